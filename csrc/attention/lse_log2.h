#pragma once

#include <cmath>

#include "common/host_device.h"

namespace flash_attn_norm {

/// softmax_lse (natural) in powers of two, for the backward pass: p = 2^(score - lse_log2). A large
/// one is so coarse that p might be far above 1, and inf. From 2^25 on it is therefore moved up by
/// more than its rounding errors, four units in the last place: p is at most 1 then, or 2^12 below
/// that bound, whose rounding errors are 12 at most, and goes to 0 as the LSE grows.
FAN_HOST_DEVICE float lse_log2_of(float softmax_lse) {
    constexpr float kLog2OfE = 1.4426950408889634f, kLarge = 33554432.0f;  // 2^25
    constexpr float kMargin = 4.76837158203125e-7f;                        // 2^-21
    const float lse_log2 = softmax_lse * kLog2OfE;
    const float magnitude = std::fabs(lse_log2);
    return magnitude >= kLarge ? lse_log2 + magnitude * kMargin : lse_log2;
}

}  // namespace flash_attn_norm
