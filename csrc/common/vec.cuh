#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "ptx/global_load.cuh"
#include "ptx/math.cuh"
#include "ptx/packed_math.cuh"

namespace flash_attn_norm {

/// Elements of a dtype in 16 bytes, the widest load of a thread.
constexpr int pack_size(DType dtype) {
    return 16 / size_of(dtype);
}

__device__ __forceinline__ uint32_t word_of(const uint4& words, int index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

__device__ __forceinline__ void unpack_pair(uint32_t word, DType dtype, float& low, float& high) {
    if (dtype == DType::kBFloat16) {
        low = __uint_as_float(word << 16);
        high = __uint_as_float(word & 0xffff0000u);
    } else {
        low = ptx::cvt_f32_f16(static_cast<uint16_t>(word));
        high = ptx::cvt_f32_f16(static_cast<uint16_t>(word >> 16));
    }
}

template <DType kDType>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    static_assert(kDType != DType::kFloat32, "two floats are no pair of 16-bit elements");
    return kDType == DType::kBFloat16 ? ptx::cvt_rn_bf16x2(low, high)
                                      : ptx::cvt_rn_f16x2(low, high);
}

/// The elements of 16 bytes as floats.
template <DType kDType>
__device__ __forceinline__ void unpack(const uint4& words, float* values) {
    if (kDType == DType::kFloat32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = __uint_as_float(word_of(words, i));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unpack_pair(word_of(words, i), kDType, values[2 * i], values[2 * i + 1]);
        }
    }
}

template <DType kDType>
__device__ __forceinline__ uint4 pack(const float* values) {
    if constexpr (kDType == DType::kFloat32) {
        return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                          __float_as_uint(values[2]), __float_as_uint(values[3]));
    } else {
        return make_uint4(
            pack_pair<kDType>(values[0], values[1]), pack_pair<kDType>(values[2], values[3]),
            pack_pair<kDType>(values[4], values[5]), pack_pair<kDType>(values[6], values[7]));
    }
}

/// Products of two packs of a 16-bit type, each rounded once.
template <DType kDType>
__device__ __forceinline__ uint4 mul_packed(const uint4& a, const uint4& b) {
    static_assert(kDType != DType::kFloat32, "for 16-bit types");
    if constexpr (kDType == DType::kBFloat16) {
        return make_uint4(ptx::mul_bf16x2(a.x, b.x), ptx::mul_bf16x2(a.y, b.y),
                          ptx::mul_bf16x2(a.z, b.z), ptx::mul_bf16x2(a.w, b.w));
    } else {
        return make_uint4(ptx::mul_f16x2(a.x, b.x), ptx::mul_f16x2(a.y, b.y),
                          ptx::mul_f16x2(a.z, b.z), ptx::mul_f16x2(a.w, b.w));
    }
}

/// The value that storing as this dtype and loading again gives.
template <DType kDType>
__device__ __forceinline__ float round_to(float value) {
    if constexpr (kDType == DType::kFloat32) {
        return value;
    } else {
        float low, high;
        unpack_pair(pack_pair<kDType>(value, 0.0f), kDType, low, high);
        return low;
    }
}

__device__ __forceinline__ float round_to(float value, DType dtype) {
    if (dtype == DType::kBFloat16) return round_to<DType::kBFloat16>(value);
    if (dtype == DType::kFloat16) return round_to<DType::kFloat16>(value);
    return value;
}

/// kCount floats from a float32 array, 16 bytes at a time.
template <int kCount>
__device__ __forceinline__ void load_floats(const float* source, float* values) {
    static_assert(kCount % 4 == 0, "16 bytes at a time");
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        unpack<DType::kFloat32>(*reinterpret_cast<const uint4*>(source + i), values + i);
    }
}

/// kCount floats (4 or 8, or 1) from an array whose dtype is known at run time only.
template <int kCount>
__device__ __forceinline__ void load_as_floats(const void* array, DType dtype, int64_t index,
                                               float* values) {
    if (dtype == DType::kFloat32) {
        const float* source = static_cast<const float*>(array) + index;
        if constexpr (kCount == 1) {
            values[0] = *source;
        } else {
            load_floats<kCount>(source, values);
        }
        return;
    }
    const uint16_t* source = static_cast<const uint16_t*>(array) + index;
    if constexpr (kCount == 1) {
        float unused;
        unpack_pair(*source, dtype, values[0], unused);
    } else if constexpr (kCount == 4) {
        const uint2 words = *reinterpret_cast<const uint2*>(source);
        unpack_pair(words.x, dtype, values[0], values[1]);
        unpack_pair(words.y, dtype, values[2], values[3]);
    } else {
        const uint4 words = *reinterpret_cast<const uint4*>(source);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unpack_pair(word_of(words, i), dtype, values[2 * i], values[2 * i + 1]);
        }
    }
}

/// Stores one value, rounded to a dtype that is known at run time only.
__device__ __forceinline__ void store_rounded(void* array, DType dtype, int64_t index,
                                              float value) {
    if (dtype == DType::kFloat32) {
        static_cast<float*>(array)[index] = value;
    } else if (dtype == DType::kBFloat16) {
        static_cast<uint16_t*>(array)[index] =
            static_cast<uint16_t>(pack_pair<DType::kBFloat16>(value, 0.0f));
    } else {
        static_cast<uint16_t*>(array)[index] =
            static_cast<uint16_t>(pack_pair<DType::kFloat16>(value, 0.0f));
    }
}

/// kCount elements of a dtype, as they lie in memory: 16 bytes, or 32 for float32 beside a 16-bit
/// type.
template <int kCount, DType kDType>
struct PackWords {
    static constexpr int kWords = kCount * size_of(kDType) / 16;
    static constexpr int kPerWord = 16 / size_of(kDType);
    uint4 words[kWords];

    __device__ __forceinline__ void get(float* values) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) unpack<kDType>(words[i], values + i * kPerWord);
    }
    __device__ __forceinline__ void set(const float* values) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = pack<kDType>(values + i * kPerWord);
    }
    /// For inputs; zeros unless `is_inside`.
    __device__ __forceinline__ void load(const void* tensor, int64_t index, bool is_inside) {
        const char* address = static_cast<const char*>(tensor) + index * size_of(kDType);
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            words[i] = make_uint4(0, 0, 0, 0);
            if (!is_inside) continue;
            words[i] = ptx::ld_global_nc(address + 16 * i);
        }
    }
    __device__ __forceinline__ void store(void* tensor, int64_t index) const {
        char* address = static_cast<char*>(tensor) + index * size_of(kDType);
#pragma unroll
        for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4*>(address)[i] = words[i];
    }
};

template <int kCount, DType kFrom, DType kTo>
__device__ __forceinline__ void convert(const PackWords<kCount, kFrom>& from,
                                        PackWords<kCount, kTo>& to) {
    if constexpr (kFrom == kTo) {
        to = from;
    } else {
        float values[kCount];
        from.get(values);
        to.set(values);
    }
}

/// Stores kCount elements of this dtype: one, or a pack.
template <DType kDType, int kCount>
__device__ __forceinline__ void store_floats(void* array, int64_t index, const float* values) {
    if constexpr (kCount == 1) {
        store_rounded(array, kDType, index, values[0]);
    } else {
        PackWords<kCount, kDType> words;
        words.set(values);
        words.store(array, index);
    }
}

}  // namespace flash_attn_norm
