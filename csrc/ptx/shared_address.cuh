#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// Address of a shared-memory object inside its state space, as ldmatrix and cp.async want it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace ptx
}  // namespace flash_attn_norm
