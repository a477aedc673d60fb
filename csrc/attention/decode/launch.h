#pragma once

#include <cuda_runtime_api.h>

#include "attention/decode/plan.h"

namespace flash_attn_norm {
namespace decode {

/// The parts of a call, in the order in which they run. One definition of the first two per size
/// class, in split_hdim*.cu.
template <int kHeadDim, int kHeadDimV>
SplitPlan plan_split(const KvCacheAttentionParams& params);
template <int kHeadDim, int kHeadDimV>
void launch_split(const KvCacheAttentionParams& params, const SplitPlan& plan, cudaStream_t stream);

/// out and softmax_lse from the parts of all splits.
void launch_combine(const KvCacheAttentionParams& params, const SplitPlan& plan,
                    cudaStream_t stream);

}  // namespace decode
}  // namespace flash_attn_norm
