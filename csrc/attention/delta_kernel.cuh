#pragma once

#include <cstdint>

#include "attention/delta_correction.h"
#include "attention/dropout.h"
#include "attention/online_softmax.cuh"
#include "attention/params.h"
#include "attention/row_squares.cuh"
#include "attention/scores.cuh"
#include "attention/tile_copy.cuh"
#include "attention/tile_scheduler.h"
#include "attention/warp_mma.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {

/// Four warps take 16 query rows each, against kKeys keys at a time. One kernel for all head dims:
/// they pass kColumns at a time. The products of dP add up in the same order as in the main kernel,
/// mma by mma, so that both get the same bits.
struct DeltaTile {
    static constexpr int kRows = 64;
    static constexpr int kKeys = 64;
    static constexpr int kColumns = 64;
    static constexpr int kThreads = 128;
    static constexpr int kPitch = pitch_of(kColumns);
    static constexpr int kTilesN = kKeys / 8;
};

struct DeltaStage {
    alignas(16) uint16_t rows[DeltaTile::kRows * DeltaTile::kPitch];  // Q or dO
    alignas(16) uint16_t keys[DeltaTile::kKeys * DeltaTile::kPitch];  // K or V
};

/// A block of query rows of one sequence and head.
struct DeltaBlock {
    int64_t batch = 0;
    int head = 0;
    int first_row = 0;
    int rows = 0;  // from first_row to the sequence's end
    SeqlenInfo info;

    /// False if there is nothing to correct.
    __device__ bool find(const AttentionProblem& problem) {
        const BlockSlots slots = BlockSlots::queries(problem, DeltaTile::kRows);
        const int64_t count = slots.count();
        const int64_t slot = blockIdx.x % count;
        head = static_cast<int>(blockIdx.x / count);
        batch = slots.batch_of(slot);
        if (batch >= problem.batch_size) return false;  // rows that no sequence covers
        info = seqlen_info(problem, batch);
        first_row = static_cast<int>(slot - slots.first_slot(batch)) * DeltaTile::kRows;
        rows = static_cast<int>(info.seqlen_q) - first_row;
        return first_row >= 0 && rows > 0 && corrects_sequence(problem, info.seqlen_k);
    }
    __device__ int kv_head(const AttentionProblem& problem) const {
        return head / problem.group_size();
    }
    __device__ const uint16_t* out_rows(const AttentionBwdParams& params) const {
        const AttentionProblem& problem = params.problem;
        const int64_t row = info.batch * problem.seqlen_q + info.row_q + first_row;
        return static_cast<const uint16_t*>(params.out) +
               (row * problem.num_heads_q + head) * problem.head_dim_v;
    }
    __device__ const uint16_t* dout_rows(const AttentionBwdParams& params) const {
        return static_cast<const uint16_t*>(params.dout) +
               tensor_offset(params.dout_strides, info.batch, info.row_q + first_row, head);
    }
};

/// Whether any row of the block may have one key only; the same for all threads.
template <class Element>
__device__ __forceinline__ bool may_have_one_key(const AttentionBwdParams& params,
                                                 const DeltaBlock& block,
                                                 const float* least_v_squares) {
    constexpr int kThreadsPerRow = 8;
    const AttentionProblem& problem = params.problem;
    const float least =
        least_v_squares[block.batch * problem.num_heads_kv + block.kv_head(problem)];
    const uint16_t* out = block.out_rows(params);
    const int64_t stride = int64_t{problem.num_heads_q} * problem.head_dim_v;
    bool found = false;
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x) / kThreadsPerRow; row < DeltaTile::kRows;
         row += DeltaTile::kThreads / kThreadsPerRow) {
        const bool exists = row < block.rows;
        const float squares = row_squares<Element, kThreadsPerRow>(
            out + row * stride, exists ? problem.head_dim_v / 8 : 0);
        found |= exists && may_be_one_key(squares, least, problem.dropout_p);
    }
    return __syncthreads_or(found) != 0;
}

/// The tiles of keys that a block of rows sees, kColumns of Q and K at a time, then of dO and V.
struct DeltaLoader {
    const AttentionBwdParams& params;
    const DeltaBlock& block;
    const BlockRange& range;
    int score_parts, parts;

    __device__ DeltaLoader(const AttentionBwdParams& bwd_params, const DeltaBlock& place,
                           const BlockRange& keys)
        : params(bwd_params), block(place), range(keys) {
        constexpr int kColumns = DeltaTile::kColumns;
        score_parts = (params.problem.head_dim + kColumns - 1) / kColumns;
        parts = score_parts + (params.problem.head_dim_v + kColumns - 1) / kColumns;
    }

    __device__ int steps() const { return (range.end - range.begin) * parts; }
    __device__ bool is_of_scores(int part) const { return part < score_parts; }

    /// Starts the copies of part `part` of key block `n_block`.
    __device__ __forceinline__ void load(DeltaStage& stage, int n_block, int part) const {
        const AttentionProblem& problem = params.problem;
        const bool of_scores = is_of_scores(part);
        const int column = (of_scores ? part : part - score_parts) * DeltaTile::kColumns;
        const int units = ((of_scores ? problem.head_dim : problem.head_dim_v) - column) / 8;
        const TensorStrides& row_strides = of_scores ? params.q_strides : params.dout_strides;
        const TensorStrides& key_strides = of_scores ? params.k_strides : params.v_strides;
        const int first_key = n_block * DeltaTile::kKeys;
        load_tile<DeltaTile::kRows, DeltaTile::kColumns, DeltaTile::kThreads>(
            ptx::shared_address(stage.rows),
            static_cast<const uint16_t*>(of_scores ? params.q : params.dout) + column +
                tensor_offset(row_strides, block.info.batch, block.info.row_q + block.first_row,
                              block.head),
            row_strides.row, block.rows, units);
        load_tile<DeltaTile::kKeys, DeltaTile::kColumns, DeltaTile::kThreads>(
            ptx::shared_address(stage.keys),
            static_cast<const uint16_t*>(of_scores ? params.k : params.v) + column +
                tensor_offset(key_strides, block.info.batch, block.info.row_k + first_key,
                              block.kv_head(problem)),
            key_strides.row, static_cast<int>(block.info.seqlen_k) - first_key, units);
    }
};

/// acc += rows . keys over the columns of a stage.
template <class Element>
__device__ __forceinline__ void add_products(float (&acc)[1][DeltaTile::kTilesN][4],
                                             DeltaStage& stage) {
    constexpr int kPitch = DeltaTile::kPitch;
    constexpr Layout kInner = Layout::kContractionInner;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    gemm<Element, kInner, kPitch, kInner, kPitch, DeltaTile::kColumns / 16>(
        acc, a_base<kInner, kPitch>(ptx::shared_address(&stage.rows[warp * 16 * kPitch]), lane),
        b_base<kInner, kPitch>(ptx::shared_address(stage.keys), lane));
}

/// A lane's part of its two rows' sums: entries 0 and 2 are those of P dP, 1 and 3 of its size.
/// They shrink like an output when the softmax' maximum grows.
using DeltaAccumulator = float[1][1][4];

/// Takes a tile's scores and dP into the sums; (row, key) is this lane's first entry.
template <class Element>
__device__ __forceinline__ void add_tile(DeltaAccumulator& sums, OnlineSoftmax<1>& softmax,
                                         float (&acc_s)[1][DeltaTile::kTilesN][4],
                                         float (&acc_dp)[1][DeltaTile::kTilesN][4],
                                         const AttentionProblem& problem, const DeltaBlock& block,
                                         const RowBounds& bounds, float scale_log2, int row,
                                         int key) {
    const ScoreTerms terms = ScoreTerms::make(problem, block.info, block.batch, block.head);
    if (terms.transforms()) terms.apply(acc_s, row, key);
    if (terms.bias.exists()) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float values[DeltaTile::kTilesN][2];
            if (terms.bias.is_float32) {
                terms.bias.template read_row<Float32>(values, row + 8 * r, key);
            } else {
                terms.bias.template read_row<Element>(values, row + 8 * r, key);
            }
#pragma unroll
            for (int n = 0; n < DeltaTile::kTilesN; ++n) {
                acc_s[0][n][2 * r] += values[n][0];
                acc_s[0][n][2 * r + 1] += values[n][1];
            }
        }
    }
    apply_mask(acc_s, row, key, bounds);
    if (problem.dropout_p > 0.0f) {
        const Dropout dropout = Dropout::make(problem.rng_state, problem.dropout_p,
                                              block.batch * problem.num_heads_q + block.head);
        const float keep_scale = 1.0f / (1.0f - problem.dropout_p);
        for_each_dropout(acc_dp, row, key, dropout,
                         [&](float& dp, bool keep) { dp = keep ? dp * keep_scale : 0.0f; });
    }
    softmax.template update</*kGuard=*/true, /*kAnyRange=*/true>(acc_s, sums, scale_log2,
                                                                 Nothing{});
#pragma unroll
    for (int n = 0; n < DeltaTile::kTilesN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float p = acc_s[0][n][e], dp = acc_dp[0][n][e];
            float* row_sums = &sums[0][0][e & 2];
            row_sums[0] = fmaf(p, dp, row_sums[0]);
            row_sums[1] = fmaf(p, fabsf(dp), row_sums[1]);
        }
    }
}

/// The sums of the stored output's row, by the four lanes that share it.
template <class Element>
__device__ __forceinline__ void add_stored(DeltaSums& sums, const uint16_t* out,
                                           const uint16_t* dout, int units) {
    for (int unit = static_cast<int>(threadIdx.x) % 4; unit < units; unit += 4) {
        const uint4 x = reinterpret_cast<const uint4*>(out)[unit];
        const uint4 y = reinterpret_cast<const uint4*>(dout)[unit];
        const uint32_t *out_pairs = &x.x, *dout_pairs = &y.x;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int shift = 16 * (i % 2);
            const float o = Element::to_float(static_cast<uint16_t>(out_pairs[i / 2] >> shift));
            const float d = Element::to_float(static_cast<uint16_t>(dout_pairs[i / 2] >> shift));
            sums.stored = fmaf(o, d, sums.stored);
            sums.stored_size += fabsf(o * d);
            sums.dout_size += fabsf(d);
        }
    }
    sums.stored = quad_sum(sums.stored);
    sums.stored_size = quad_sum(sums.stored_size);
    sums.dout_size = quad_sum(sums.dout_size);
}

/// Stores delta of this lane's rows.
template <class Element>
__device__ __forceinline__ void store_delta(const AttentionBwdParams& params,
                                            const DeltaBlock& block, const DeltaAccumulator& sums,
                                            OnlineSoftmax<1>& softmax, float scale_log2,
                                            float* delta, int block_m, int tile_row) {
    const AttentionProblem& problem = params.problem;
    const float sink = problem.s_aux == nullptr
                           ? negative_infinity()
                           : load_as_float(problem.s_aux, problem.s_aux_dtype, block.head);
    const BlockSlots slots = BlockSlots::queries(problem, block_m);
    const int64_t first_slot = block.head * slots.count() + slots.first_slot(block.batch);
    delta += first_slot * block_m + block.first_row;
    const int64_t lse_row = lse_offset(problem, block.info, block.head) + block.first_row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = tile_row + 8 * r;
        const bool exists = row < block.rows;
        DeltaSums found;
        float normalizer;
        found.own_lse = softmax.finish(0, r, scale_log2, sink, normalizer);
        found.stored_lse = exists ? params.softmax_lse[lse_row + row] : negative_infinity();
        found.own = quad_sum(sums[0][0][2 * r]) * normalizer;
        found.own_size = quad_sum(sums[0][0][2 * r + 1]) * normalizer;
        add_stored<Element>(
            found,
            block.out_rows(params) + row * (int64_t{problem.num_heads_q} * problem.head_dim_v),
            block.dout_rows(params) + row * params.dout_strides.row,
            exists ? problem.head_dim_v / 8 : 0);
        if (!exists || threadIdx.x % 4 != 0 || !found.is_own(problem.dtype)) continue;
        // A row without a key has a delta of 0, whatever dsoftmax_lse holds.
        if (found.stored_lse == negative_infinity()) continue;
        delta[row] = params.dsoftmax_lse == nullptr
                         ? found.own
                         : found.own - params.dsoftmax_lse[lse_row + row];
    }
}

/// delta = sum_j P_j dP_j - dsoftmax_lse of the rows that corrects_sequence() names.
template <class Element>
__global__ void __launch_bounds__(DeltaTile::kThreads)
    delta_kernel(const __grid_constant__ AttentionBwdParams params, float* delta, const int block_m,
                 const float* least_v_squares) {
    __shared__ DeltaStage stages[2];
    const AttentionProblem& problem = params.problem;
    DeltaBlock block;
    if (!block.find(problem)) return;
    if (corrects_single_keys_only(problem, block.info.seqlen_k) &&
        !may_have_one_key<Element>(params, block, least_v_squares)) {
        return;
    }
    const Mask mask{block.info.seqlen_q, block.info.seqlen_k, problem.window_left,
                    problem.window_right};
    const RowBounds bounds = RowBounds::make(mask);
    const int row_end = block.first_row + min(block.rows, DeltaTile::kRows);
    const BlockRange range = key_blocks(mask, block.first_row, row_end, DeltaTile::kKeys);
    const DeltaLoader loader(params, block, range);
    const bool transforms =
        ScoreTerms::make(problem, block.info, block.batch, block.head).transforms();
    const float scale_log2 = transforms ? kLog2E : problem.softmax_scale * kLog2E;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int tile_row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;

    OnlineSoftmax<1> softmax;
    DeltaAccumulator sums = {};
    float acc_s[1][DeltaTile::kTilesN][4] = {};
    float acc_dp[1][DeltaTile::kTilesN][4] = {};
    const int steps = loader.steps();
    int n_block = range.begin, part = 0;
    if (steps > 0) loader.load(stages[0], n_block, part);
    ptx::cp_async_commit_group();
    for (int step = 0; step < steps; ++step) {
        const bool ends_tile = part + 1 == loader.parts;
        const int next_block = ends_tile ? n_block + 1 : n_block;
        const int next_part = ends_tile ? 0 : part + 1;
        if (step + 1 < steps) loader.load(stages[(step + 1) % 2], next_block, next_part);
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<1>();
        __syncthreads();  // this step's stage is there

        // S += Q K^T, then dP += dO V^T
        if (loader.is_of_scores(part)) {
            add_products<Element>(acc_s, stages[step % 2]);
        } else {
            add_products<Element>(acc_dp, stages[step % 2]);
        }
        if (ends_tile) {
            // delta += P dP
            add_tile<Element>(sums, softmax, acc_s, acc_dp, problem, block, bounds, scale_log2,
                              block.first_row + tile_row,
                              n_block * DeltaTile::kKeys + 2 * (lane % 4));
            clear(acc_s);
            clear(acc_dp);
        }
        __syncthreads();  // and free
        n_block = next_block;
        part = next_part;
    }
    store_delta<Element>(params, block, sums, softmax, scale_log2, delta, block_m, tile_row);
}

}  // namespace flash_attn_norm
