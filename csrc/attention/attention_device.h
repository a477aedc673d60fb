#pragma once

#include "common/launch.h"

namespace flash_attn_norm {

/// The limits of the current device; refuses a card that no attention kernel runs on.
const DeviceLimits& attention_device_limits();

}  // namespace flash_attn_norm
