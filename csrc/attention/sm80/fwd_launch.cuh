#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "attention/sm80/fwd_kernel.cuh"
#include "attention/sm80/launch.h"
#include "common/check.h"
#include "common/dispatch.h"

namespace flash_attn_norm {
namespace sm80 {

template <class Config>
void launch_fwd_config(const AttentionFwdParams& params, const DeviceLimits& device,
                       cudaStream_t stream) {
    const AttentionProblem& problem = params.problem;
    const int64_t ctas =
        BlockSlots::queries(problem, Config::kBlockM).count() * problem.num_heads_q;
    if (ctas == 0) return;
    int bytes = static_cast<int>(sizeof(FwdSharedStorage<Config>));
    int bias_unit = 0;
    if (Config::kGeneral && problem.attn_bias != nullptr) {
        const int bias_bytes =
            FwdBiasTile<Config>::bytes(problem.attn_bias_dtype == DType::kFloat32);
        if (bytes + bias_bytes <= device.shared_per_block) bias_unit = bias_unit_bytes(problem);
        if (bias_unit > 0) bytes += bias_bytes;
    }
    static std::atomic<uint64_t> allowed{0};
    allow_shared_memory(reinterpret_cast<const void*>(fwd_kernel<Config>), device.shared_per_block,
                        device.device, allowed);
    fwd_kernel<Config><<<grid_size("attention forward", ctas), Config::kThreads, bytes, stream>>>(
        params, bias_unit);
    check_launch("attention forward");
}

template <int kHeadDim, int kHeadDimV>
void launch_fwd(const AttentionFwdParams& params, const DeviceLimits& device, cudaStream_t stream) {
    const AttentionProblem& problem = params.problem;
    dispatch_bool(needs_general_kernel(problem), [&](auto general) {
        constexpr bool kGeneral = decltype(general)::value;
        if (problem.dtype == DType::kBFloat16) {
            launch_fwd_config<FwdConfig<BFloat16, kHeadDim, kHeadDimV, kGeneral>>(params, device,
                                                                                  stream);
        } else {
            launch_fwd_config<FwdConfig<Float16, kHeadDim, kHeadDimV, kGeneral>>(params, device,
                                                                                 stream);
        }
    });
}

}  // namespace sm80
}  // namespace flash_attn_norm
