#include <cuda_runtime_api.h>

#include "common/archs.h"
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

bool runs_sm90() {
    return has_code_from_hopper_on(current_device_limits().capability_major, CUDART_VERSION);
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
