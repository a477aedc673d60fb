#include "attention/sm80/fwd_launch.cuh"

namespace flash_attn_norm {
namespace sm80 {

template void launch_fwd<256, 256>(const AttentionFwdParams&, const DeviceLimits&, cudaStream_t);

}  // namespace sm80
}  // namespace flash_attn_norm
