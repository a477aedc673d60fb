#pragma once

#include "common/host_device.h"

namespace flash_attn_norm {

/// Shared-memory tiles are row-major with rows of the columns and 8 more (16 bytes), so that eight
/// rows of one 16-byte column, which ldmatrix reads at once, lie in eight different bank groups;
/// and every fragment's address is one register plus a constant.
FAN_HOST_DEVICE constexpr int pitch_of(int columns) {
    return columns + 8;
}

}  // namespace flash_attn_norm
