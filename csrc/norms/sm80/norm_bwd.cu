#include "norms/norm_bwd_plan.cuh"

namespace flash_attn_norm {
namespace sm80 {

void norm_bwd(const NormBwdParams& params, const Allocator& allocate, cudaStream_t stream) {
    launch_norm_bwd<Sm80>(params, allocate, stream);
}

}  // namespace sm80
}  // namespace flash_attn_norm
