#include "norms/norm_bwd_plan.cuh"

namespace flash_attn_norm {
namespace sm90 {

void norm_bwd(const NormBwdParams& params, const Allocator& allocate, cudaStream_t stream) {
    launch_norm_bwd<Sm90>(params, allocate, stream);
}

}  // namespace sm90
}  // namespace flash_attn_norm
