#pragma once

#include <cuda_runtime.h>

#include "attention/decode/config.h"
#include "attention/decode/split_params.h"
#include "common/check.h"

namespace flash_attn_norm {
namespace decode {

/// Launches kernel(params). On Sm90 as a programmatically dependent launch: the kernel waits itself
/// for those before it, so that its start overlaps with their end. The CTAs of a column of the grid
/// may form clusters of cluster_size.
template <class Arch, class Params>
void launch_kernel(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes,
                   const Params& params, const char* name, cudaStream_t stream,
                   int cluster_size = 1) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    cudaLaunchAttribute attributes[2];
    config.attrs = attributes;
    if (Arch::kHasGridDependency) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster_size > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = attribute.val.clusterDim.z = 1;
        attribute.val.clusterDim.y = static_cast<unsigned>(cluster_size);
    }
    check_cuda(cudaLaunchKernelEx(&config, kernel, params), name);
}

/// The parts of a call, in the order in which they run. One definition of the first two per
/// architecture and size class, in sm*/split_hdim*.cu, of the last one in sm*/combine.cu.
template <class Arch, int kHeadDim, int kHeadDimV>
SplitPlan plan_split(const KvCacheAttentionParams& params);
template <class Arch, int kHeadDim, int kHeadDimV>
void launch_split(const KvCacheAttentionParams& params, const SplitPlan& plan,
                  const SplitParams& split_params, cudaStream_t stream);

/// out and softmax_lse from the parts of all splits.
template <class Arch>
void launch_combine(const SplitParams& params, DType dtype, cudaStream_t stream);

}  // namespace decode
}  // namespace flash_attn_norm
