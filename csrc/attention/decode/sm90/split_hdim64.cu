#include "attention/decode/split_launch.cuh"

namespace flash_attn_norm {
namespace decode {

template SplitPlan plan_split<Sm90, 64, 64>(const KvCacheAttentionParams&);
template void launch_split<Sm90, 64, 64>(const KvCacheAttentionParams&, const SplitPlan&,
                                         const SplitParams&, cudaStream_t);

}  // namespace decode
}  // namespace flash_attn_norm
