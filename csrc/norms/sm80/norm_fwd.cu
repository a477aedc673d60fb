#include "norms/norm_fwd_plan.cuh"

namespace flash_attn_norm {
namespace sm80 {

void norm_fwd(const NormFwdParams& params, cudaStream_t stream) {
    launch_norm_fwd<Sm80>(params, stream);
}

}  // namespace sm80
}  // namespace flash_attn_norm
