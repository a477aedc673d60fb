#pragma once

#include <cstdint>

#include "attention/element.cuh"
#include "attention/online_softmax.cuh"
#include "attention/params.h"
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

/// Turns the sums of weighted values into outputs. lse: of the block's first row.
template <class Config>
__device__ __forceinline__ void normalize(FwdWarp<Config>& warp, const AttentionProblem& problem,
                                          const FwdBlock& place, int rows, float scale_log2,
                                          float* lse) {
    // Rows that no sequence covers have no sink either.
    const float sink = problem.s_aux == nullptr || place.batch == problem.batch_size
                           ? negative_infinity()
                           : load_as_float(problem.s_aux, problem.s_aux_dtype, place.head);
    const float keep_scale = 1.0f / (1.0f - problem.dropout_p);
#pragma unroll
    for (int m = 0; m < Config::kTilesM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float normalizer;
            const float row_lse = warp.softmax.finish(m, r, scale_log2, sink, normalizer);
            normalizer *= keep_scale;
            const int row = warp.row + 16 * m + 8 * r;
            if (warp.lane % 4 == 0 && warp.column == 0 && row < rows) lse[row] = row_lse;
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

}  // namespace sm80
}  // namespace flash_attn_norm
