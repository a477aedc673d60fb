#include "attention/decode/sm90a/bulk_launch.cuh"

namespace flash_attn_norm {
namespace decode {

template SplitPlan plan_bulk<256>(const KvCacheAttentionParams&);
template void launch_bulk<256>(const KvCacheAttentionParams&, const SplitPlan&, const SplitParams&,
                               cudaStream_t);

}  // namespace decode
}  // namespace flash_attn_norm
