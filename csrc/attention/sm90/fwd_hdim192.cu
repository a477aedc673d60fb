#include "attention/sm90/fwd_launch.cuh"

namespace flash_attn_norm {
namespace sm90 {

template void launch_fwd<192, 192>(const AttentionFwdParams&, int, cudaStream_t);

}  // namespace sm90
}  // namespace flash_attn_norm
