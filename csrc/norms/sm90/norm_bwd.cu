#include "norms/norm_bwd_plan.cuh"

namespace flash_attn_norm {
namespace sm90 {

int64_t norm_bwd_workspace_bytes(const NormBwdParams& params) {
    return norm_bwd_workspace<Sm90>(params);
}

void norm_bwd(const NormBwdParams& params, cudaStream_t stream) {
    launch_norm_bwd<Sm90>(params, stream);
}

}  // namespace sm90
}  // namespace flash_attn_norm
