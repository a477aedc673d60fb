#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "attention/sm90/encode_tensor_map.h"
#include "attention/sm90/fwd_kernel.cuh"
#include "attention/sm90/fwd_launch.h"
#include "attention/sm90/tensor_map.h"
#include "common/check.h"
#include "common/dispatch.h"
#include "common/launch.h"

namespace flash_attn_norm {
namespace sm90 {

template <class Config>
FwdArguments fwd_arguments(const AttentionFwdParams& params) {
    const AttentionProblem& problem = params.problem;
    const TensorShape q = query_shape(problem, problem.head_dim);
    const TensorShape k = key_shape(problem, problem.head_dim);
    const TensorShape v = key_shape(problem, problem.head_dim_v);
    const TensorShape out = query_shape(problem, problem.head_dim_v);
    FwdArguments arguments;
    arguments.map_q =
        encode_tensor_map(tensor_map_shape<Config::kHeadDim>(q, params.q_strides, Config::kBlockM),
                          params.q, problem.dtype);
    arguments.map_k =
        encode_tensor_map(tensor_map_shape<Config::kHeadDim>(k, params.k_strides, Config::kBlockN),
                          params.k, problem.dtype);
    arguments.map_v =
        encode_tensor_map(tensor_map_shape<Config::kHeadDimV>(v, params.v_strides, Config::kBlockN),
                          params.v, problem.dtype);
    arguments.map_out =
        encode_tensor_map(tensor_map_shape<Config::kHeadDimV>(out, contiguous_strides(out), 64),
                          params.out, problem.dtype);
    arguments.params = params;
    return arguments;
}

template <class Config>
void launch_fwd_config(const AttentionFwdParams& params, int num_sms, cudaStream_t stream) {
    const AttentionProblem& problem = params.problem;
    const FwdTileWalk walk = FwdTileWalk::make(problem, Config::kBlockM);
    const int64_t tiles = walk.count();
    if (tiles == 0) return;
    FwdArguments arguments = fwd_arguments<Config>(params);
    arguments.walk = walk;
    arguments.num_tiles = static_cast<int>(tiles);
    const int grid = std::min(arguments.num_tiles, num_sms);
    // Tiles of one length are dealt out in turn; others are claimed one by one.
    if ((Config::kBanded || problem.is_packed()) && tiles > grid) {
        arguments.tile_counter = static_cast<int*>(params.workspace);
        FAN_CUDA_CHECK(cudaMemsetAsync(arguments.tile_counter, 0, sizeof(int), stream));
    }
    static std::atomic<uint64_t> allowed{0};
    allow_shared_memory(reinterpret_cast<const void*>(fwd_kernel<Config>),
                        sizeof(FwdSharedStorage<Config>), current_device_limits().device, allowed);
    fwd_kernel<Config>
        <<<grid, Config::kThreads, sizeof(FwdSharedStorage<Config>), stream>>>(arguments);
    check_launch("attention forward");
}

/// The body that has code for all that the call needs and no more.
inline FwdBody fwd_body(const AttentionProblem& problem) {
    if (problem.softcap > 0.0f || problem.alibi_slopes != nullptr) return FwdBody::kGeneral;
    if (problem.window_left < 0 && problem.window_right < 0) return FwdBody::kFull;
    return FwdBody::kBanded;
}

template <class Element, int kHeadDim, int kHeadDimV>
void launch_fwd_element(const AttentionFwdParams& params, int num_sms, cudaStream_t stream) {
    const AttentionProblem& problem = params.problem;
    const auto launch = [&](auto body) {
        using Kernel = FwdKernel<Element, kHeadDim, kHeadDimV, decltype(body)::value>;
        launch_fwd_config<FwdConfig<Kernel>>(params, num_sms, stream);
    };
    switch (fwd_body(problem)) {
        case FwdBody::kFull:
            return launch(std::integral_constant<FwdBody, FwdBody::kFull>{});
        case FwdBody::kGeneral:
            return launch(std::integral_constant<FwdBody, FwdBody::kGeneral>{});
        default:
            break;
    }
    if constexpr (kHeadDim == 64) {
        // Known on the host only for dense tensors
        if (!problem.is_packed() && problem.seqlen_k <= kFewKeys) {
            return launch(std::integral_constant<FwdBody, FwdBody::kBandedShort>{});
        }
    }
    launch(std::integral_constant<FwdBody, FwdBody::kBanded>{});
}

template <int kHeadDim, int kHeadDimV>
void launch_fwd(const AttentionFwdParams& params, int num_sms, cudaStream_t stream) {
    if (params.problem.dtype == DType::kBFloat16) {
        launch_fwd_element<BFloat16, kHeadDim, kHeadDimV>(params, num_sms, stream);
    } else {
        launch_fwd_element<Float16, kHeadDim, kHeadDimV>(params, num_sms, stream);
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
