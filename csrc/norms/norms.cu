#include <cuda_runtime_api.h>

#include "common/launch.h"
#include "norms/norms.h"

namespace flash_attn_norm {

namespace sm80 {
void norm_fwd(const NormFwdParams& params, cudaStream_t stream);
void norm_bwd(const NormBwdParams& params, const Allocator& allocate, cudaStream_t stream);
}  // namespace sm80

namespace sm90 {
void norm_fwd(const NormFwdParams& params, cudaStream_t stream);
void norm_bwd(const NormBwdParams& params, const Allocator& allocate, cudaStream_t stream);
}  // namespace sm90

namespace cuda {

namespace {

/// The capabilities that build.toml gives sm90/: any other card runs sm80/, as native code or from
/// its PTX.
bool runs_sm90() {
    const int major = current_device_limits().capability_major;
    return major == 9 || major == 10 || major == 12;
}

}  // namespace

void norm_fwd(const NormFwdParams& params, void* stream) {
    const auto norm_fwd = runs_sm90() ? &sm90::norm_fwd : &sm80::norm_fwd;
    norm_fwd(params, static_cast<cudaStream_t>(stream));
}

void norm_bwd(const NormBwdParams& params, const Allocator& allocate, void* stream) {
    const auto norm_bwd = runs_sm90() ? &sm90::norm_bwd : &sm80::norm_bwd;
    norm_bwd(params, allocate, static_cast<cudaStream_t>(stream));
}

}  // namespace cuda
}  // namespace flash_attn_norm
