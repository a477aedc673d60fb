#pragma once

#include <cstdint>
#include <cstring>

/// Scalar conversions of 16-bit floats, round to nearest even.
namespace flash_attn_norm {
namespace cpu {

inline uint32_t float_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float bf16_to_float(uint16_t x) {
    return float_from_bits(uint32_t{x} << 16);
}

inline uint16_t float_to_bf16(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(uint16_t x) {
    const uint32_t sign = uint32_t{x & 0x8000u} << 16;
    const uint32_t magnitude = x & 0x7fffu;
    if (magnitude >= 0x7c00u) {  // inf, NaN
        return float_from_bits(sign | 0x7f800000u | (magnitude << 13));
    }
    // As bits of a float the exponent is 112 too small; the product also sets denormals right.
    const float scaled = float_from_bits(magnitude << 13) * float_from_bits(0x77800000u);  // 2^112
    return float_from_bits(sign | float_bits(scaled));
}

inline uint16_t float_to_fp16(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to inf
    if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        const float shifted = float_from_bits(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (float_bits(shifted) - float_bits(0.5f)));
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}

}  // namespace cpu
}  // namespace flash_attn_norm
