#pragma once

#include <cstdint>
#include <cstring>

namespace flash_attn_norm {
namespace cpu {

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float to_float(float value) {
    return value;
}

inline float to_float(BFloat16 value) {
    return bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}

/// Through a multiplication that moves the exponent, which takes subnormals along.
inline float to_float(Float16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u) {  // inf or NaN
        return bits_to_float(sign | magnitude | 0x7f800000u);
    }
    constexpr uint32_t kTwoTo112 = (127u + 112u) << 23;
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * bits_to_float(kTwoTo112)));
}

inline void from_float(float value, float& result) {
    result = value;
}

/// Round to nearest even; NaN stays a (quiet) NaN.
inline void from_float(float value, BFloat16& result) {
    const uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        result.bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
        return;
    }
    result.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Round to nearest even, to subnormals and infinity too; NaN stays a (quiet) NaN.
inline void from_float(float value, Float16& result) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude >= 0x47800000u) {  // 65536 and above, inf, NaN
        half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24
        half = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
    } else {
        const uint32_t rebiased = magnitude - ((127u - 15u) << 23);
        half = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
    }
    result.bits = static_cast<uint16_t>(sign | half);
}

/// The value that storing as Element and loading again gives.
template <class Element>
float rounded_to(float value) {
    Element element;
    from_float(value, element);
    return to_float(element);
}

}  // namespace cpu
}  // namespace flash_attn_norm
