#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention/attention.h"
#include "attention/attention_device.h"
#include "attention/bwd_passes.h"
#include "attention/delta_correction.h"
#include "attention/short_queries.h"
#include "attention/sink_gradient.h"
#include "attention/sm80/launch.h"
#include "attention/sm90/bwd_launch.h"
#include "attention/sm90/fwd_launch.h"
#include "common/dispatch.h"

namespace flash_attn_norm {

namespace {

/// Calls fn(head dim of q and k, head dim of v) with the smallest size class that holds both.
template <class Fn>
void with_size_class(const AttentionProblem& problem, Fn&& fn) {
    if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) {
        throw std::invalid_argument("head_dim = " + std::to_string(problem.head_dim) +
                                    " and head_dim_v = " + std::to_string(problem.head_dim_v) +
                                    " must be multiples of 8 here; pad them");
    }
    const int head_dim = problem.head_dim, head_dim_v = problem.head_dim_v;
    if (head_dim > 128 && head_dim <= 192 && head_dim_v <= 128) {
        return fn(std::integral_constant<int, 192>{}, std::integral_constant<int, 128>{});
    }
    const int larger = std::max(head_dim, head_dim_v);
    const int size_class = larger <= 64    ? 64
                           : larger <= 96  ? 96
                           : larger <= 128 ? 128
                           : larger <= 192 ? 192
                           : larger <= 256 ? 256
                                           : 512;
    if (larger > 512) {
        throw std::invalid_argument("head_dim = " + std::to_string(larger) +
                                    " is not supported; the largest is 512");
    }
    dispatch_int<64, 96, 128, 192, 256, 512>("head_dim", size_class,
                                             [&](auto head) { fn(head, head); });
}

/// Calls fn(head dim, head dim of v, small) with the size class and the tiles that fit the device.
template <class Fn>
void with_bwd_class(const AttentionProblem& problem, const DeviceLimits& device, Fn&& fn) {
    with_size_class(problem, [&](auto head_dim, auto head_dim_v) {
        dispatch_bool(device.shared_per_block < sm80::kLargeShared,
                      [&](auto small) { fn(head_dim, head_dim_v, small); });
    });
}

/// Code for sm_90a runs on capability 9.0 and nowhere else.
bool may_use_hopper(const AttentionProblem& problem, const DeviceLimits& device) {
    return device.capability_major == 9 && device.capability_minor == 0 && !problem.force_portable;
}

bool uses_hopper_fwd(const AttentionFwdParams& params, const DeviceLimits& device) {
    return may_use_hopper(params.problem, device) && sm90::can_run_fwd(params);
}

bool uses_hopper_bwd(const AttentionBwdParams& params, const DeviceLimits& device) {
    return may_use_hopper(params.problem, device) && !has_few_keys(params.problem) &&
           sm90::can_run_bwd(params);
}

/// `rows`: see rows_of_cache_call().
KvCacheAttentionParams cache_call(const AttentionFwdParams& params, int64_t rows) {
    KvCacheAttentionParams call = as_cache_call(params);
    if (rows != kAllRows) call.most_rows = rows;
    if (params.problem.is_packed()) {
        KvCacheAttentionParams mean_call = as_mean_cache_call(params);
        mean_call.most_rows = call.most_rows;
        call.num_splits = cuda::attention_kvcache_num_splits(mean_call);
    }
    return call;
}

BwdPlan plan_bwd(const AttentionBwdParams& params, const DeviceLimits& device) {
    if (uses_hopper_bwd(params, device)) return sm90::plan_bwd(params, device.num_sms);
    BwdPlan plan;
    with_bwd_class(params.problem, device, [&](auto head_dim, auto head_dim_v, auto small) {
        plan = sm80::plan_bwd<head_dim.value, head_dim_v.value, small.value>(params, device);
    });
    return plan;
}

/// Between bwd_preprocess and the main kernel.
void renew_delta(const AttentionBwdParams& params, const BwdPlan& plan, cudaStream_t stream) {
    if (!needs_delta_correction(params)) return;
    const BwdWorkspace workspace = plan.carve(params);
    float* const least_v_squares =
        reinterpret_cast<float*>(static_cast<char*>(params.workspace) + workspace.total_bytes);
    cuda::correct_delta(params, workspace.delta, plan.block_m, least_v_squares, stream);
    cuda::renew_sink_parts(params, workspace, plan.block_m, stream);
}

}  // namespace

const DeviceLimits& attention_device_limits() {
    const DeviceLimits& limits = current_device_limits();
    if (limits.capability_major < 8) {
        throw std::invalid_argument("attention on CUDA device " + std::to_string(limits.device) +
                                    " of compute capability " +
                                    std::to_string(limits.capability_major) + "." +
                                    std::to_string(limits.capability_minor) +
                                    " is not supported; it needs capability 8.0 or later");
    }
    return limits;
}

namespace cuda {

int64_t attention_fwd_workspace_bytes(const AttentionFwdParams& params) {
    const DeviceLimits& device = attention_device_limits();
    const bool hopper = uses_hopper_fwd(params, device);
    const int64_t cache_rows = rows_of_cache_call(params, device.num_sms, hopper);
    if (cache_rows == kAllRows) {
        return attention_kvcache_workspace_bytes(cache_call(params, cache_rows));
    }
    return hopper ? sm90::fwd_workspace_bytes(params) : 0;
}

void attention_fwd(const AttentionFwdParams& params, void* stream) {
    const DeviceLimits& device = attention_device_limits();
    const bool hopper = uses_hopper_fwd(params, device);
    const int64_t cache_rows = rows_of_cache_call(params, device.num_sms, hopper);
    if (cache_rows > 0) attention_kvcache(cache_call(params, cache_rows), stream);
    if (cache_rows == kAllRows) return;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    with_size_class(params.problem, [&](auto head_dim, auto head_dim_v) {
        constexpr int kHeadDim = head_dim.value, kHeadDimV = head_dim_v.value;
        if constexpr (kHeadDim <= 256) {
            if (hopper) {
                AttentionFwdParams rest = params;
                rest.least_rows = cache_rows + 1;
                return sm90::launch_fwd<kHeadDim, kHeadDimV>(rest, device.num_sms, cuda_stream);
            }
        }
        sm80::launch_fwd<kHeadDim, kHeadDimV>(params, device, cuda_stream);
    });
}

int64_t attention_bwd_workspace_bytes(const AttentionBwdParams& params) {
    const BwdPlan plan = plan_bwd(params, attention_device_limits());
    return plan.carve(params).total_bytes + least_v_bytes(params);
}

DType bias_gradient_dtype(const AttentionBwdParams& params) {
    const bool summed = params.dattn_bias_strides.row == 0 || bias_gradient_is_shared(params);
    return summed ? DType::kFloat32 : params.problem.attn_bias_dtype;
}

void attention_bwd(const AttentionBwdParams& params, void* stream) {
    const DeviceLimits& device = attention_device_limits();
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const BwdPlan plan = plan_bwd(params, device);
    const bool hopper = uses_hopper_bwd(params, device);
    const BwdPassOptions options = hopper ? sm90::bwd_pass_options(params) : BwdPassOptions{};
    bwd_preprocess(params, plan, options, cuda_stream);
    renew_delta(params, plan, cuda_stream);
    if (hopper) {
        sm90::launch_bwd(params, plan, device.num_sms, cuda_stream);
    } else {
        with_bwd_class(params.problem, device, [&](auto head_dim, auto head_dim_v, auto small) {
            sm80::launch_bwd<head_dim.value, head_dim_v.value, small.value>(params, plan, device,
                                                                            cuda_stream);
        });
    }
    bwd_postprocess(params, plan, options, cuda_stream);
}

}  // namespace cuda

}  // namespace flash_attn_norm
