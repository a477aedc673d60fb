#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

/// e4m3, torch.float8_e4m3fn: a sign, four bits of exponent (bias 7) and three of mantissa. It has
/// no infinity; 0x7f and 0xff are NaN, and the largest number is 448 (Micikevicius et al., "FP8
/// Formats for Deep Learning", table 1). bfloat16 and float16 hold every number of it.
namespace flash_attn_norm {

constexpr uint8_t kE4m3Nan = 0x7f, kE4m3Largest = 0x7e;

FAN_HOST_DEVICE float e4m3_to_float(uint8_t bits) {
    const uint32_t sign = uint32_t{bits & 0x80u} << 24, magnitude = bits & 0x7fu;
    uint32_t word = (magnitude << 20) + (120u << 23);  // float's bias is 127
    if (magnitude == kE4m3Nan) word = 0x7fc00000u;
    float value;
    memcpy(&value, &word, sizeof value);
    if (magnitude < 8) value = static_cast<float>(magnitude) * 0x1p-9f;  // subnormal
    memcpy(&word, &value, sizeof word);
    word |= sign;
    memcpy(&value, &word, sizeof value);
    return value;
}

/// Rounds to nearest even; what is larger than 448 becomes 448, infinity too; NaN stays NaN.
FAN_HOST_DEVICE uint8_t float_to_e4m3(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    const uint32_t sign = word >> 24 & 0x80u;
    uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | kE4m3Nan);
    if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | kE4m3Largest);  // 448
    if (magnitude < 0x3c800000u) {  // below 2^-6: a multiple of 2^-9, as floats from 2^14 on are
        float shifted;
        memcpy(&shifted, &magnitude, sizeof shifted);
        shifted += 0x1p14f;
        memcpy(&word, &shifted, sizeof word);
        return static_cast<uint8_t>(sign | (word - 0x46800000u));
    }
    magnitude += 0x7ffffu + (magnitude >> 20 & 1u);
    return static_cast<uint8_t>(sign | (magnitude - (120u << 23)) >> 20);
}

constexpr float kE4m3ToFloat16Scale = 256.0f;  // 2^(15 - 7), between the two biases

/// Four e4m3 numbers as float16, divided by that: bytes 0 and 2 of a word in `even`, bytes 1 and 3
/// in `odd`. Exponent and mantissa move as they are, subnormal ones too; NaN stays NaN.
FAN_HOST_DEVICE void e4m3_to_scaled_float16(uint32_t word, uint32_t& even, uint32_t& odd) {
    const uint32_t is_nan = ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;  // its sign bit
    const uint32_t odd_nan = is_nan & 0x80008000u, even_nan = is_nan << 8 & 0x80008000u;
    odd = (word & 0x80008000u) | (word >> 1 & 0x3f803f80u) | (odd_nan - (odd_nan >> 6));
    even = (word << 8 & 0x80008000u) | (word << 7 & 0x3f803f80u) | (even_nan - (even_nan >> 6));
}

}  // namespace flash_attn_norm
