#include "attention/decode/sm90a/tall_launch.cuh"

namespace flash_attn_norm {
namespace decode {

template SplitPlan plan_tall<128>(const KvCacheAttentionParams&);
template void launch_tall<128>(const KvCacheAttentionParams&, const SplitPlan&, const SplitParams&,
                               cudaStream_t);

}  // namespace decode
}  // namespace flash_attn_norm
