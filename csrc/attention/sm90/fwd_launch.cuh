#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "attention/sm90/dependent_launch.h"
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
    arguments.map_out = encode_tensor_map(
        tensor_map_shape<Config::kHeadDimV>(out, contiguous_strides(out), Config::kStoreRows),
        params.out, problem.dtype);
    arguments.params = params;
    return arguments;
}

/// `lists`: of a packed call; null for a dense one, and for a packed one that lists_few_tiles().
template <class Config>
void launch_fwd_config(const AttentionFwdParams& params, const FwdTileLists* lists, int num_sms,
                       cudaStream_t stream) {
    constexpr bool kShort = Config::kBody == FwdBody::kShort;
    const FwdTileWalk walk = FwdTileWalk::make(params.problem, Config::kBlockM);
    const int64_t tiles = walk.count();  // packed: at most
    const int64_t grid = std::min(tiles, int64_t{num_sms} * Config::kCtasPerSm);
    if (grid == 0) return;
    FwdArguments arguments = fwd_arguments<Config>(params);
    arguments.walk = walk;
    if (lists != nullptr) arguments.walk.list = kShort ? lists->short_list() : lists->long_list();
    arguments.lists_few_tiles = params.problem.is_packed() && lists == nullptr;
    // Tiles of one length are dealt out in turn; others are claimed one by one.
    if (lists != nullptr) {
        if (!kShort) arguments.tile_counter = lists->counter;
    } else if (has_band(params.problem) && !kShort && tiles > grid) {
        arguments.tile_counter = static_cast<int*>(params.workspace);
        reset_tile_counter(arguments.tile_counter, stream);
    }
    static std::atomic<uint64_t> allowed{0};
    allow_shared_memory(reinterpret_cast<const void*>(fwd_kernel<Config>),
                        sizeof(FwdSharedStorage<Config>), current_device_limits().device, allowed);
    constexpr int kBytes = sizeof(FwdSharedStorage<Config>);
    // Measured: in a call without either it gains nothing, but with grouped heads.
    if (lists != nullptr || arguments.tile_counter != nullptr ||
        (!params.problem.is_packed() && params.problem.group_size() > 1)) {
        return launch_dependent(fwd_kernel<Config>, grid, Config::kThreads, kBytes, stream,
                                "attention forward", arguments);
    }
    fwd_kernel<Config>
        <<<static_cast<unsigned>(grid), Config::kThreads, kBytes, stream>>>(arguments);
    check_launch("attention forward");
}

template <class Element, int kHeadDim, int kHeadDimV>
struct FwdLauncher {
    template <FwdBody kBody>
    using Config = FwdConfig<FwdKernel<Element, kHeadDim, kHeadDimV, kBody>>;

    const AttentionFwdParams& params;
    int num_sms;
    cudaStream_t stream;

    template <FwdBody kBody>
    void launch(const FwdTileLists* lists) const {
        launch_fwd_config<Config<kBody>>(params, lists, num_sms, stream);
    }

    void launch(FwdBody body, const FwdTileLists* lists) const {
        switch (body) {
            case FwdBody::kFull:
                return launch<FwdBody::kFull>(lists);
            case FwdBody::kGeneral:
                return launch<FwdBody::kGeneral>(lists);
            case FwdBody::kBanded:
                return launch<FwdBody::kBanded>(lists);
            case FwdBody::kBandedShort:
                if constexpr (kHeadDim == 64) launch<FwdBody::kBandedShort>(lists);
                return;
            case FwdBody::kShort:
                if constexpr (has_short_kernels(kHeadDim)) launch<FwdBody::kShort>(lists);
                return;
        }
    }

    static int block_m(FwdBody body) {
        return body == FwdBody::kShort     ? kShortRows
               : body == FwdBody::kFull    ? Config<FwdBody::kFull>::kBlockM
               : body == FwdBody::kGeneral ? Config<FwdBody::kGeneral>::kBlockM
                                           : Config<FwdBody::kBanded>::kBlockM;
    }

    /// Where tiles are so few that a CTA has one at most, smaller ones are done sooner, unless a
    /// sequence may have many keys.
    FwdBody of_few_tiles(FwdBody body) const {
        const bool may_be_short = has_short_kernels(kHeadDim) && body != FwdBody::kGeneral &&
                                  params.problem.total_k <= 4 * kShortKeys;
        return may_be_short ? FwdBody::kShort : body;
    }

    /// Whether each CTA has a tile at most and lists them all itself, so that one launch does.
    bool lists_few_tiles(FwdBody body) const {
        const AttentionProblem& problem = params.problem;
        const int64_t tiles = BlockSlots::queries(problem, block_m(body)).count();
        return problem.batch_size <= kFewSequences && tiles <= kFewTiles &&
               tiles * problem.num_heads_q <= num_sms;
    }

    /// A kernel for the short sequences and one for the others, for any mixture of them. Not worth
    /// a launch are the few short ones of a batch with many rows in the mean, and a few tiles.
    void launch_packed(FwdBody body) const {
        constexpr int64_t kManyRows = 192;
        const AttentionProblem& problem = params.problem;
        if (problem.total_q == 0) return;
        const FwdBody few_body = of_few_tiles(body);
        if (lists_few_tiles(few_body)) return launch(few_body, nullptr);
        FwdTileLists lists = FwdTileLists::carve(problem, params.workspace);
        lists.block_m = block_m(body);
        lists.least_rows = params.least_rows;
        const bool shared = params.least_rows > 1;  // most of the short ones are left out
        if (body != FwdBody::kGeneral && !shared &&
            problem.total_q <= kManyRows * problem.batch_size &&
            problem.batch_size * problem.num_heads_q > num_sms) {
            lists.short_rows = longest_short_sequence(kHeadDim);
        }
        list_packed_tiles(problem, lists, stream);
        launch(body, &lists);
        if constexpr (has_short_kernels(kHeadDim)) {
            if (lists.short_rows > 0) launch<FwdBody::kShort>(&lists);
        }
    }
};

template <class Element, int kHeadDim, int kHeadDimV>
void launch_fwd_element(const AttentionFwdParams& params, int num_sms, cudaStream_t stream) {
    const FwdLauncher<Element, kHeadDim, kHeadDimV> launcher{params, num_sms, stream};
    const FwdBody body = fwd_body(params.problem, kHeadDim);
    if (params.problem.is_packed()) {
        launcher.launch_packed(body);
    } else {
        launcher.launch(body, nullptr);
    }
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
