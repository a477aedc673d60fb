#include "attention/sm90/bwd_cluster_launch.cuh"

namespace flash_attn_norm {
namespace sm90 {

template BwdPlan plan_bwd_cluster<256>(const AttentionBwdParams&, int);
template void launch_bwd_cluster<256>(const AttentionBwdParams&, const BwdPlan&, int, cudaStream_t);

}  // namespace sm90
}  // namespace flash_attn_norm
