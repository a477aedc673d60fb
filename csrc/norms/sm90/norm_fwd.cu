#include "norms/norm_fwd_plan.cuh"

namespace flash_attn_norm {
namespace sm90 {

void norm_fwd(const NormFwdParams& params, cudaStream_t stream) {
    launch_norm_fwd<Sm90>(params, stream);
}

}  // namespace sm90
}  // namespace flash_attn_norm
