#pragma once

#include <cstdint>
#include <cstring>

#include "attention/cpu/half_types.h"

namespace flash_attn_norm {
namespace cpu {
namespace {

/// Four floats in the compiler's own vector type: SSE2 on x86-64, NEON on aarch64.
struct PlainSimd {
    using Vec = float __attribute__((vector_size(16)));
    using Int = int32_t __attribute__((vector_size(16)));
    static constexpr int kWidth = 4;

    static Vec broadcast(float x) { return Vec{x, x, x, x}; }
    static Vec load(const float* p) {
        Vec v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
    static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
    static Vec add(Vec a, Vec b) { return a + b; }
    static Vec sub(Vec a, Vec b) { return a - b; }
    static Vec mul(Vec a, Vec b) { return a * b; }
    static Vec div(Vec a, Vec b) { return a / b; }
    static Vec max(Vec a, Vec b) { return select(a > b, a, b); }
    /// The smaller one, b if either is NaN.
    static Vec min(Vec a, Vec b) { return select(a < b, a, b); }
    static Vec abs(Vec a) { return reinterpret_cast<Vec>(reinterpret_cast<Int>(a) & 0x7fffffff); }
    /// x where a < b, else y.
    static Vec select_less(Vec a, Vec b, Vec x, Vec y) { return select(a < b, x, y); }
    static float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
    static float reduce_max(Vec v) {
        float result = v[0];
        for (int i = 1; i < kWidth; ++i) result = result > v[i] ? result : v[i];
        return result;
    }

    /// 2^x for x <= 128, relative error about 2 ulp; 0 below -126.
    static Vec exp2(Vec x) {
        // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
        const Vec magic = broadcast(12582912.0f);
        const Vec clamped = max(x, broadcast(-127.0f));
        const Vec shifted = clamped + magic;
        const Vec f = clamped - (shifted - magic);
        Vec p = broadcast(1.53533619e-4f);
        p = fma(p, f, broadcast(1.3398875e-3f));
        p = fma(p, f, broadcast(9.61843692e-3f));
        p = fma(p, f, broadcast(5.55033237e-2f));
        p = fma(p, f, broadcast(0.240226477f));
        p = fma(p, f, broadcast(0.693147182f));
        p = fma(p, f, broadcast(1.0f));
        const Int exponent = reinterpret_cast<Int>(shifted) << 23;
        const Vec scaled = reinterpret_cast<Vec>(reinterpret_cast<Int>(p) + exponent);
        const Vec result = select(x < broadcast(-126.0f), broadcast(0.0f), scaled);
        return select(x == x, result, x);  // NaN stays
    }

    static Vec load_bf16(const uint16_t* p) {
        return Vec{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]),
                   bf16_to_float(p[3])};
    }
    static Vec load_fp16(const uint16_t* p) {
        return Vec{fp16_to_float(p[0]), fp16_to_float(p[1]), fp16_to_float(p[2]),
                   fp16_to_float(p[3])};
    }
    static void store_bf16(uint16_t* p, Vec v) {
        for (int i = 0; i < kWidth; ++i) p[i] = float_to_bf16(v[i]);
    }
    static void store_fp16(uint16_t* p, Vec v) {
        for (int i = 0; i < kWidth; ++i) p[i] = float_to_fp16(v[i]);
    }

    /// kWidth unsigned 32-bit numbers.
    using Bits = uint32_t __attribute__((vector_size(16)));
    static Bits broadcast_bits(uint32_t x) { return Bits{x, x, x, x}; }
    static Bits count_from(uint32_t first) { return Bits{first, first + 1, first + 2, first + 3}; }
    static Bits exclusive_or(Bits a, Bits b, Bits c) { return a ^ b ^ c; }
    /// The halves of the 64-bit products a * b.
    static void multiply_wide(Bits a, Bits b, Bits* high, Bits* low) {
        for (int i = 0; i < kWidth; ++i) {
            const uint64_t product = uint64_t{a[i]} * b[i];
            (*high)[i] = static_cast<uint32_t>(product >> 32);
            (*low)[i] = static_cast<uint32_t>(product);
        }
    }
    /// value where bits >= bound, else 0.
    static Vec value_where_at_least(Bits bits, Bits bound, Vec value) {
        return select(bits >= bound, value, broadcast(0.0f));
    }

    /// dst[c][r] = src[r][c] of a kWidth x kWidth block of 32-bit words.
    static void transpose_words(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
        for (int r = 0; r < kWidth; ++r) {
            for (int c = 0; c < kWidth; ++c) dst[c * ld_dst + r] = src[r * ld_src + c];
        }
    }

  private:
    static Vec select(Int mask, Vec x, Vec y) {
        return reinterpret_cast<Vec>((mask & reinterpret_cast<Int>(x)) |
                                     (~mask & reinterpret_cast<Int>(y)));
    }
};

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
