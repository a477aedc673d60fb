#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/online_softmax.cuh"
#include "attention/params.h"
#include "attention/scores.cuh"
#include "attention/sm90/fwd_arguments.h"
#include "attention/sm90/fwd_config.h"
#include "attention/sm90/fwd_epilogue.cuh"
#include "attention/sm90/fwd_producer.cuh"
#include "attention/sm90/fwd_shared_storage.h"
#include "attention/sm90/fwd_work.h"
#include "attention/sm90/warpgroup_mma.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// One consumer warpgroup: 64 query rows of the tile.
template <class Config>
class FwdConsumer {
  public:
    using Element = typename Config::Element;
    using LayoutQ = typename Config::LayoutQ;
    using LayoutK = typename Config::LayoutK;
    using LayoutV = typename Config::LayoutV;

    __device__ __forceinline__ FwdConsumer(FwdSharedStorage<Config>& shared_storage,
                                           const FwdArguments& fwd_arguments, int warpgroup_index)
        : shared(shared_storage), arguments(fwd_arguments), warpgroup(warpgroup_index) {
        thread = static_cast<int>(threadIdx.x) % 128;
        lane = thread % 32;
        lane_row = 64 * warpgroup + thread / 32 * 16 + lane / 4;
        const AttentionProblem& problem = arguments.params.problem;
        scale_log2 = problem.softmax_scale * kLog2E;
        if constexpr (Config::kGeneral) {
            terms.softmax_scale = problem.softmax_scale;
            terms.softcap = problem.softcap;
            terms.has_alibi = problem.alibi_slopes != nullptr;
            if (terms.transforms()) scale_log2 = kLog2E;
        }
    }

    /// Works until no tile is left.
    __device__ __forceinline__ void run() {
        if (Config::kTile.ping_pong && warpgroup == 0) give_turn(0);
        next_work();
#pragma unroll 1
        while (!work.is_end()) {
            if (work.blocks.begin < work.blocks.end) {
                consume_kv_tiles();
            } else {
                store_empty_rows<Config>(arguments, work, warpgroup, thread);
                next_work();
            }
        }
        // Shared memory must outlive the last store's reading of it.
        if (thread % (2 * Config::kStoreRows) == 0) ptx::bulk_wait_group_read<0>();
    }

  private:
    /// O += softmax(Q K^T) V over the tile's key blocks, right to left: under a
    /// causal mask only the first ones cross the diagonal. Then stores O.
    __device__ __forceinline__ void consume_kv_tiles() {
        const BlockRange blocks = work.blocks;
        int n_block = blocks.end - 1;
        begin_tile();

        // S = Q K^T of the first block, whose keys may end within it
        shared.q_full[q_state.index].wait(q_state.parity);
        if constexpr (Config::kTile.register_q) load_queries();
        shared.k_full[k_state.index].wait(k_state.parity);
        if (Config::kHalfBlocks && sees_lower_half_only(n_block)) {
            first_block<Config::kHalfBlocks ? Config::kTilesN / 2 : Config::kTilesN>(n_block);
        } else {
            first_block<Config::kTilesN>(n_block);
        }
        clear_values_past_end();

        // Each step multiplies the next block's Q K^T and this block's P V at once,
        // and works on the softmax of the one while the other is running.
        if constexpr (Config::kGeneral) {
            steps</*kMasked=*/true>(n_block, blocks.begin);
        } else if constexpr (Config::kBanded) {
            steps</*kMasked=*/true>(n_block, max(blocks.begin, blocks.full_end));
            steps</*kMasked=*/false>(n_block, max(blocks.begin, blocks.full_begin));
            steps</*kMasked=*/true>(n_block, blocks.begin);
        } else {
            steps</*kMasked=*/false>(n_block, blocks.begin);
        }

        // O += P V of the last block; the next tile is looked up meanwhile
        if constexpr (!Config::kTile.register_q) release(shared.q_empty, q_state);
        if (Config::kTile.rescale_first) rescale_output();
        shared.v_full[v_state.index].wait(v_state.parity);
        issue_pv</*kGivesTurn=*/false>();
        const FwdWork finished = work;
        next_work();
        float lse[2];
        float normalizer[2];
        finish_rows(finished, lse, normalizer);
        ptx::wgmma_wait_group<0>();
        release(shared.v_empty, v_state);
        store_output(shared, arguments, finished, warpgroup, thread,
                     OutputRows<Config>{acc_o, normalizer}, lse);
    }

    /// True when none of this warpgroup's rows sees a key of the block's upper
    /// half: of two warpgroups, one is in this place wherever a tile starts on
    /// the diagonal.
    __device__ __forceinline__ bool sees_lower_half_only(int n_block) const {
        const int last_row = work.block * Config::kBlockM + 64 * warpgroup + 63;
        const int end = min(last_row + work.right, work.seqlen_k) - n_block * Config::kBlockN;
        return end <= Config::kBlockN / 2;
    }

    /// S and P of the first block, or of its first kTiles groups of eight keys;
    /// the others' P is 0.
    template <int kTiles>
    __device__ __forceinline__ void first_block(int n_block) {
        auto& scores = reinterpret_cast<float (&)[1][kTiles][4]>(acc_s);
        issue_qk(scores);
        ptx::wgmma_wait_group<0>();
        release(shared.k_empty, k_state);
        score_to_probabilities</*kMasked=*/true>(scores, n_block);
#pragma unroll
        for (int n = kTiles; n < Config::kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_s[0][n][e] = 0.0f;
        }
        round_probabilities();
    }

    /// Steps through the blocks n_block - 1 ... until.
    template <bool kMasked>
    __device__ __forceinline__ void steps(int& n_block, int until) {
#pragma unroll 1
        for (--n_block; n_block >= until; --n_block) {
            // S = Q K^T
            shared.k_full[k_state.index].wait(k_state.parity);
            if (Config::kTile.ping_pong) take_turn();
            issue_qk(acc_s);
            if (Config::kTile.rescale_first) rescale_output();

            // O += P V of the block before
            shared.v_full[v_state.index].wait(v_state.parity);
            issue_pv</*kGivesTurn=*/Config::kTile.ping_pong>();

            // P = exp2(S * scale_log2 - row_max) beside that product
            ptx::wgmma_wait_group<1>();
            release(shared.k_empty, k_state);
            if (Config::kTile.wait_first) finish_pv();
            score_to_probabilities<kMasked>(acc_s, n_block);
            if (!Config::kTile.wait_first) finish_pv();
            round_probabilities();
            if (!Config::kTile.rescale_first) rescale_output();
        }
        ++n_block;  // the last block that was worked on
    }

    __device__ __forceinline__ void begin_tile() {
        softmax = OnlineSoftmax<1>();
        shrink[0][0] = shrink[0][1] = 1.0f;
        grew = true;
#pragma unroll
        for (int d = 0; d < Config::kTilesD; ++d) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_o[0][d][e] = 0.0f;
        }
        if constexpr (Config::kGeneral) {
            const AttentionProblem& problem = arguments.params.problem;
            terms.shift = work.seqlen_k - work.seqlen_q;
            if (terms.has_alibi && work.sequence < problem.batch_size) {
                terms.alibi_slope =
                    problem.alibi_slopes[work.sequence * problem.alibi_batch_stride + work.head];
            }
        }
    }

    /// This warp's rows of Q; their buffer is free when every warp has its own.
    __device__ __forceinline__ void load_queries() {
        int my_lane = lane;
        ptx::make_opaque(my_lane);  // no address in the main loop's registers
        load_operand<LayoutQ>(queries, ptx::shared_address(shared.q[q_state.index].bytes),
                              64 * warpgroup + thread / 32 * 16, my_lane);
        __syncwarp();
        if (lane == 0) shared.q_empty[q_state.index].arrive();
        q_state.advance();
    }

    template <int kTiles>
    __device__ __forceinline__ void issue_qk(float (&scores)[1][kTiles][4]) {
        const uint32_t q = ptx::shared_address(shared.q[q_state.index].bytes) +
                           static_cast<uint32_t>(64 * warpgroup * LayoutQ::kRowBytes);
        const uint32_t k = ptx::shared_address(shared.k[k_state.index].bytes);
        ptx::wgmma_fence();
        if constexpr (Config::kTile.register_q) {
            gemm_columns<Element, LayoutK>(scores, queries, LayoutK::column_descriptor(k));
        } else {
            gemm_columns<Element, LayoutQ, LayoutK>(scores, LayoutQ::column_descriptor(q),
                                                    LayoutK::column_descriptor(k));
        }
        ptx::wgmma_commit_group();
    }

    /// The next warpgroup takes its turn while the last instructions wait for the tensor cores.
    template <bool kGivesTurn>
    __device__ __forceinline__ void issue_pv() {
        constexpr int kTail = Config::kTile.turn_tail, kSteps = Config::kBlockN / 16;
        const int next = (warpgroup + 1) % Config::kConsumers;
        const uint32_t v = ptx::shared_address(shared.v[v_state.index].bytes);
        ptx::wgmma_fence();
        using Mma = ElementWgmma<Element, Config::kHeadDimV>;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            if (kGivesTurn && kTail > 0 && k == kSteps - kTail) give_turn(next);
            Mma::template rs<ptx::Major::kOuter>(
                &acc_o[0][0][0], probabilities + 4 * k,
                LayoutV::row_descriptor(v) + (LayoutV::row_step_offset(k) >> 4), 1);
        }
        ptx::wgmma_commit_group();
        if (kGivesTurn && kTail == 0) give_turn(next);
    }

    __device__ __forceinline__ void finish_pv() {
        ptx::wgmma_wait_group<0>();
        release(shared.v_empty, v_state);
    }

    /// Scores to probabilities in place, and the factors by which older output shrinks.
    template <bool kMasked, int kTiles>
    __device__ __forceinline__ void score_to_probabilities(float (&scores)[1][kTiles][4],
                                                           int n_block) {
        const int row = work.block * Config::kBlockM + lane_row;
        const int key = n_block * Config::kBlockN + 2 * (lane % 4);
        if constexpr (Config::kGeneral) {
            if (terms.transforms()) terms.apply(scores, row, key);
        }
        if constexpr (kMasked) {
            if constexpr (Config::kBanded) {
                if (arguments.params.problem.window_left >= 0) {
                    const int begin[2] = {row + work.left - key, row + 8 + work.left - key};
                    mask_until(scores, begin);
                }
                const int end[2] = {min(row + work.right, work.seqlen_k) - key,
                                    min(row + 8 + work.right, work.seqlen_k) - key};
                mask_from(scores, end);
            } else {
                const bool ends = work.seqlen_k < (n_block + 1) * Config::kBlockN;
                const int end[2] = {work.seqlen_k - key, work.seqlen_k - key};
                // By a vote, for the lanes of a warp must not seem to part
                if (!Config::kTile.vote_on_mask || __any_sync(0xffffffffu, ends)) {
                    mask_from(scores, end);
                }
            }
        }
        constexpr bool kGuard = kMasked || Config::kGeneral;
        grew = softmax.template probabilities<kGuard, Config::kTile.lazy_rescale>(scores, shrink,
                                                                                  scale_log2);
    }

    /// Rounds P to the element type: an accumulator's layout is that of an A operand.
    __device__ __forceinline__ void round_probabilities() {
#pragma unroll
        for (int n = 0; n < Config::kTilesN; ++n) {
            probabilities[2 * n] = Element::pack(acc_s[0][n][0], acc_s[0][n][1]);
            probabilities[2 * n + 1] = Element::pack(acc_s[0][n][2], acc_s[0][n][3]);
        }
    }

    __device__ __forceinline__ void rescale_output() {
        if (Config::kTile.lazy_rescale && !grew) return;
#pragma unroll
        for (int d = 0; d < Config::kTilesD; ++d) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_o[0][d][e] *= shrink[0][e >> 1];
        }
    }

    /// The rows of V behind the end of a packed sequence belong to the next one
    /// or to nobody. Their probabilities are 0, but 0 * NaN is not: zeros take
    /// their place.
    __device__ __forceinline__ void clear_values_past_end() {
        if (!arguments.params.problem.is_packed()) return;
        const int end = work.blocks.end * Config::kBlockN;
        if (end <= work.seqlen_k) return;
        shared.v_full[v_state.index].wait(v_state.parity);
        const int first = Config::kBlockN - (end - work.seqlen_k);
        constexpr int kUnits = Config::kHeadDimV / 8;
        const int count = (Config::kBlockN - first) * kUnits;
        int from = 128 * warpgroup + thread;
        ptx::make_opaque(from);
        for (int i = from; i < count; i += 128 * Config::kConsumers) {
            const int offset = LayoutV::unit_offset(first + i / kUnits, i % kUnits);
            *reinterpret_cast<uint4*>(shared.v[v_state.index].bytes + offset) =
                make_uint4(0, 0, 0, 0);
        }
        ptx::fence_proxy_async_shared();
        ptx::bar_sync(kBarrierValuesCleared, 128 * Config::kConsumers);
    }

    /// The LSE of this lane's two rows and the factors that turn O into the output.
    __device__ __forceinline__ void finish_rows(const FwdWork& finished, float (&lse)[2],
                                                float (&normalizer)[2]) {
        const float sink = sink_of(arguments.params.problem, finished);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            lse[r] = softmax.finish(0, r, scale_log2, sink, normalizer[r]);
        }
    }

    __device__ __forceinline__ void next_work() {
        shared.work_full.wait(work_round & 1);
        ++work_round;
        work = shared.work;
        __syncwarp();
        if (lane == 0) shared.work_empty.arrive();
    }

    template <int kStages>
    __device__ __forceinline__ void release(Mbarrier (&empty)[kStages],
                                            PipelineState<kStages>& state) {
        if (thread == 0) empty[state.index].arrive();
        state.advance();
    }

    __device__ __forceinline__ void take_turn() { ptx::bar_sync(kBarrierTurn + warpgroup, 256); }
    __device__ __forceinline__ void give_turn(int to) { ptx::bar_arrive(kBarrierTurn + to, 256); }

    FwdSharedStorage<Config>& shared;
    const FwdArguments& arguments;
    const int warpgroup;
    int thread;    // in the warpgroup
    int lane;      // in the warp
    int lane_row;  // this lane's first row in the tile; the other one lies eight below
    float scale_log2;
    ScoreTerms terms;
    FwdWork work;
    uint32_t work_round = 0;
    PipelineState<Config::kQStages> q_state;
    PipelineState<Config::kStages> k_state, v_state;

    OnlineSoftmax<1> softmax;
    float shrink[1][2];
    bool grew = true;  // false: shrink is 1
    float acc_s[1][Config::kTilesN][4];
    uint32_t queries[Config::kTile.register_q ? Config::kHeadDim / 4 : 1];
    uint32_t probabilities[Config::kBlockN / 4];
    float acc_o[1][Config::kTilesD][4];
};

/// A persistent CTA: warpgroup 0 loads and schedules, the others compute.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    fwd_kernel(const __grid_constant__ FwdArguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<FwdSharedStorage<Config>*>(shared_bytes);
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    if (threadIdx.x == 0) {
        if (ptx::shared_address(shared_bytes) % 1024 != 0) __trap();  // swizzling needs it
        init_barriers(shared);
        ptx::prefetch_tensormap(&arguments.map_q);
        ptx::prefetch_tensormap(&arguments.map_k);
        ptx::prefetch_tensormap(&arguments.map_v);
        ptx::prefetch_tensormap(&arguments.map_out);
    }
    // Here and not in the scheduler's branch, which has few registers
    if (arguments.lists_few_tiles && threadIdx.x / 32 == 1) {
        list_few_tiles(shared, arguments.params);
    }
    __syncthreads();
    if (arguments.walk.list.tiles == nullptr) {  // else the scheduler waits, for the list
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) {
            load_kv_tiles(shared, arguments);
        } else if (threadIdx.x == 32) {
            schedule_tiles(shared, arguments);
        }
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        FwdConsumer<Config>(shared, arguments, warpgroup - 1).run();
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
