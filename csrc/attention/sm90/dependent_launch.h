#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.h"

namespace flash_attn_norm {
namespace sm90 {

/// Launches kernel(arguments...) so that it may start before the kernel ahead of it in the stream
/// has ended (programmatic stream serialization): it calls griddepcontrol.wait itself, in every
/// CTA, before it touches what that one writes or reads.
template <class... Arguments>
void launch_dependent(void (*kernel)(Arguments...), int64_t ctas, int threads, int shared_bytes,
                      cudaStream_t stream, const char* name, const Arguments&... arguments) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_size(name, ctas));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

}  // namespace sm90
}  // namespace flash_attn_norm
