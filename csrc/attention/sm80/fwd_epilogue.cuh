#pragma once

#include <cstdint>

#include "attention/delta_correction.h"
#include "attention/element.cuh"
#include "attention/online_softmax.cuh"
#include "attention/params.h"
#include "attention/row_squares.cuh"
#include "attention/sm80/config.h"
#include "attention/tile_copy.cuh"
#include "attention/tile_scheduler.h"
#include "attention/warp_mma.cuh"

namespace flash_attn_norm {
namespace sm80 {

/// One CTA's share of the forward pass: a block of query rows of one sequence and head.
struct FwdBlock {
    int64_t batch = 0;  // sequence
    int head = 0;
    int block = 0;
    SeqlenInfo info;

    /// False for a slot that no rows fall into.
    __device__ bool find(const AttentionProblem& problem, int block_m) {
        const BlockSlots slots = BlockSlots::queries(problem, block_m);
        const int64_t index = blockIdx.x;
        if (problem.is_packed()) {
            const int64_t count = slots.count();
            const int64_t slot = count - 1 - index % count;
            head = static_cast<int>(index / count);
            batch = slots.batch_of(slot);
            block = static_cast<int>(slot - slots.first_slot(batch));
        } else {
            // Blocks of one head are neighbours, so that they share its keys in the L2; the last
            // one, which sees most keys under a causal mask, comes first.
            const int64_t blocks = slots.blocks_per_entry();
            const int64_t batch_head = index / blocks;
            batch = batch_head / problem.num_heads_q;
            head = static_cast<int>(batch_head % problem.num_heads_q);
            block = static_cast<int>(blocks - 1 - index % blocks);
        }
        info = seqlen_info_or_uncovered(problem, batch, /*of_queries=*/true);
        return block >= 0 && int64_t{block} * block_m < info.seqlen_q;
    }
};

/// A warp's place in the tile and its state over the key loop.
template <class Config>
struct FwdWarp {
    int lane = 0;
    int row = 0;     // this lane's first row in the block
    int column = 0;  // the warp's first value column
    OnlineSoftmax<Config::kTilesM> softmax;
    float acc_o[Config::kTilesM][Config::kTilesD][4];

    __device__ FwdWarp() {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        lane = static_cast<int>(threadIdx.x) % 32;
        row = (warp % Config::kWarpsM) * Config::kRowsPerWarp + lane / 4;
        column = (warp / Config::kWarpsM) * Config::kColumnsPerWarp;
        clear(acc_o);
    }
};

/// Turns the sums of weighted values into outputs. lse: of the block's first row; the general body
/// takes null, if it is not wanted.
template <class Config>
__device__ __forceinline__ void normalize(FwdWarp<Config>& warp, const AttentionProblem& problem,
                                          const FwdBlock& place, int rows, float scale_log2,
                                          float* lse) {
    // Rows that no sequence covers have no sink either.
    const float sink = problem.s_aux == nullptr || place.batch == problem.batch_size
                           ? negative_infinity()
                           : load_as_float(problem.s_aux, problem.s_aux_dtype, place.head);
    const float keep_scale = 1.0f / (1.0f - problem.dropout_p);
    const bool has_lse = !Config::kGeneral || lse != nullptr;
#pragma unroll
    for (int m = 0; m < Config::kTilesM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float normalizer;
            const float row_lse = warp.softmax.finish(m, r, scale_log2, sink, normalizer);
            normalizer *= keep_scale;
            const int row = warp.row + 16 * m + 8 * r;
            if (has_lse && warp.lane % 4 == 0 && warp.column == 0 && row < rows) lse[row] = row_lse;
#pragma unroll
            for (int d = 0; d < Config::kTilesD; ++d) {
                warp.acc_o[m][d][2 * r] *= normalizer;
                warp.acc_o[m][d][2 * r + 1] *= normalizer;
            }
        }
    }
}

/// Normalises, writes the LSE, and stores the output through shared memory.
template <class Config>
__device__ __forceinline__ void store_output(FwdSharedStorage<Config>& shared,
                                             FwdWarp<Config>& warp,
                                             const AttentionFwdParams& params,
                                             const FwdBlock& place, float scale_log2) {
    const AttentionProblem& problem = params.problem;
    const int first_row = place.block * Config::kBlockM;
    const int rows = static_cast<int>(place.info.seqlen_q) - first_row;
    normalize(warp, problem, place, rows, scale_log2,
              params.softmax_lse + lse_offset(problem, place.info, place.head) + first_row);
    __syncthreads();  // every warp has read Q
    accumulator_to_tile<typename Config::Element, Config::kPitchV>(
        &shared.q[(warp.row - warp.lane / 4) * Config::kPitchV + warp.column], warp.acc_o,
        warp.lane);
    __syncthreads();
    const int64_t row_stride = int64_t{problem.num_heads_q} * problem.head_dim_v;
    const int64_t row = place.info.batch * problem.seqlen_q + place.info.row_q + first_row;
    uint16_t* out = static_cast<uint16_t*>(params.out) + row * row_stride +
                    int64_t{place.head} * problem.head_dim_v;
    store_tile<Config::kBlockM, Config::kHeadDimV, Config::kThreads>(out, row_stride, shared.q,
                                                                     rows, problem.head_dim_v / 8);
}

/// What rounding took from `output`; 0 if `stored` is not this output rounded, but one that the
/// caller has put together of several calls.
template <class Element>
__device__ __forceinline__ float lost_by_rounding(float output, uint16_t stored) {
    const bool is_its_own = static_cast<uint16_t>(Element::pack(output, 0.0f)) == stored;
    return is_its_own ? output - Element::to_float(stored) : 0.0f;
}

/// Whether any row of the block may have one key only; the same for all threads.
template <class Config>
__device__ __forceinline__ bool needs_correction(const AttentionFwdParams& params,
                                                 const DeltaCorrection& correction,
                                                 const FwdBlock& place) {
    constexpr int kThreadsPerRow = 8;
    const AttentionProblem& problem = params.problem;
    if (place.batch == problem.batch_size) return false;  // rows that no sequence covers
    if (has_few_keys(problem)) return true;
    const int64_t first_row = int64_t{place.block} * Config::kBlockM;
    const int64_t out_stride = int64_t{problem.num_heads_q} * problem.head_dim_v;
    const int64_t out_row = place.info.batch * problem.seqlen_q + place.info.row_q + first_row;
    const uint16_t* out = static_cast<const uint16_t*>(params.out) + out_row * out_stride +
                          int64_t{place.head} * problem.head_dim_v;
    const int kv_head = place.head / problem.group_size();
    const float least = correction.least_v_squares[place.batch * problem.num_heads_kv + kv_head];
    bool found = false;
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x) / kThreadsPerRow; row < Config::kBlockM;
         row += Config::kThreads / kThreadsPerRow) {
        const bool exists = first_row + row < place.info.seqlen_q;
        const float squares = row_squares<typename Config::Element, kThreadsPerRow>(
            out + row * out_stride, exists ? problem.head_dim_v / 8 : 0);
        found |= exists && may_be_one_key(squares, least, problem.dropout_p);
    }
    return __syncthreads_or(found) != 0;
}

/// Normalises, and adds to delta what rounding took from dout . out.
template <class Config>
__device__ __forceinline__ void correct_delta(FwdSharedStorage<Config>& shared,
                                              FwdWarp<Config>& warp,
                                              const AttentionFwdParams& params,
                                              const DeltaCorrection& correction,
                                              const FwdBlock& place, float scale_log2) {
    using Element = typename Config::Element;
    const AttentionProblem& problem = params.problem;
    const int first_row = place.block * Config::kBlockM;
    const int rows = static_cast<int>(place.info.seqlen_q) - first_row;
    const int64_t out_stride = int64_t{problem.num_heads_q} * problem.head_dim_v;
    const int64_t out_row = place.info.batch * problem.seqlen_q + place.info.row_q + first_row;
    const uint16_t* out = static_cast<const uint16_t*>(params.out) + out_row * out_stride +
                          int64_t{place.head} * problem.head_dim_v;
    const uint16_t* dout = static_cast<const uint16_t*>(correction.dout) +
                           tensor_offset(correction.dout_strides, place.info.batch,
                                         place.info.row_q + first_row, place.head);
    float* sums = reinterpret_cast<float*>(shared.q);  // [kWarpsD, kBlockM]
    normalize(warp, problem, place, rows, scale_log2, nullptr);
    __syncthreads();  // every warp has read Q
#pragma unroll
    for (int m = 0; m < Config::kTilesM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp.row + 16 * m + 8 * r;
            float sum = 0.0f;
#pragma unroll
            for (int d = 0; d < Config::kTilesD; ++d) {
                const int column = warp.column + 8 * d + 2 * (warp.lane % 4);
                if (row >= rows || column >= problem.head_dim_v) continue;
                const uint32_t x =
                    *reinterpret_cast<const uint32_t*>(out + row * out_stride + column);
                const uint32_t y = *reinterpret_cast<const uint32_t*>(
                    dout + row * correction.dout_strides.row + column);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const auto stored = static_cast<uint16_t>(x >> (16 * e));
                    sum = fmaf(lost_by_rounding<Element>(warp.acc_o[m][d][2 * r + e], stored),
                               Element::to_float(static_cast<uint16_t>(y >> (16 * e))), sum);
                }
            }
            sum = quad_sum(sum);
            if (warp.lane % 4 == 0) {
                sums[warp.column / Config::kColumnsPerWarp * Config::kBlockM + row] = sum;
            }
        }
    }
    __syncthreads();
    const BlockSlots slots = BlockSlots::queries(problem, correction.block_m);
    const int64_t first_slot = place.head * slots.count() + slots.first_slot(place.batch);
    float* delta = correction.delta + first_slot * correction.block_m + first_row;
    for (int row = threadIdx.x; row < min(rows, Config::kBlockM); row += Config::kThreads) {
        float sum = sums[row];
        for (int i = 1; i < Config::kWarpsD; ++i) sum += sums[i * Config::kBlockM + row];
        delta[row] += sum;
    }
}

}  // namespace sm80
}  // namespace flash_attn_norm
