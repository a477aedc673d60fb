#pragma once

namespace flash_attn_norm {

/// Whether a build of this CUDA version (CUDART_VERSION, 12060 for 12.6) has native code of the
/// sections of build.toml that list 9.0, 10.0 and 12.0 and no PTX: its compiler must know them.
/// Other cards run the code that was compiled for 8.0, or its PTX.
constexpr bool has_code_from_hopper_on(int capability_major, int cuda_version) {
    const bool is_blackwell = capability_major == 10 || capability_major == 12;
    return capability_major == 9 || (is_blackwell && cuda_version >= 12080);
}

}  // namespace flash_attn_norm
