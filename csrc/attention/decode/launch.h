#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "attention/attention_device.h"
#include "attention/decode/config.h"
#include "attention/decode/plan.h"
#include "attention/decode/split_params.h"
#include "common/check.h"
#include "common/launch.h"

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

/// Launches kernel(kernel_params), which computes splits: a CTA for each row tile, KV head and
/// split. `allowed`: see allow_shared_memory.
template <class Arch, class Params>
void launch_splits(void (*kernel)(Params), const KvCacheAttentionParams& params,
                   const SplitPlan& plan, int threads, int shared_bytes,
                   const Params& kernel_params, std::atomic<uint64_t>& allowed,
                   cudaStream_t stream) {
    constexpr const char* kName = "attention to a cache";
    const DeviceLimits& device = attention_device_limits();
    allow_shared_memory(reinterpret_cast<const void*>(kernel), device.shared_per_block,
                        device.device, allowed);
    const dim3 grid(grid_size(kName, plan.row_tiles * params.problem.num_heads_kv),
                    static_cast<unsigned>(plan.num_splits));
    launch_kernel<Arch>(kernel, grid, threads, shared_bytes, kernel_params, kName, stream,
                        plan.in_cluster ? plan.num_splits : 1);
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
