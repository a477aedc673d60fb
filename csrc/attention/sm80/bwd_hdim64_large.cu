#include "attention/sm80/bwd_launch.cuh"

namespace flash_attn_norm {
namespace sm80 {

template BwdPlan plan_bwd<64, 64, false>(const AttentionBwdParams&, const DeviceLimits&);
template void launch_bwd<64, 64, false>(const AttentionBwdParams&, const BwdPlan&,
                                        const DeviceLimits&, cudaStream_t);

}  // namespace sm80
}  // namespace flash_attn_norm
