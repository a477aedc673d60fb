#pragma once

#include <cstdint>

#include "attention/bwd_workspace.h"
#include "attention/sm80/config.h"
#include "attention/tile_copy.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace sm80 {

/// Arguments of the main kernel.
struct BwdArgs {
    AttentionBwdParams params;
    BwdWorkspace workspace;
    int head_splits = 1;
    int q_stages = 1;
    int dout_stages = 1;
    int bias_unit = 0;  // its tiles lie behind the stages, copied so many bytes at a time; 0: none
    int last_part = 0;  // 1: P and dS come in two parts: rounded, and what rounding took
};

/// One CTA's share of the backward pass: a block of keys of one sequence and K/V head, and the
/// query heads [head_begin, head_end) of its group.
struct BwdBlock {
    int64_t batch = 0;
    int64_t slot = 0;  // of the key block
    int kv_head = 0;
    int head_begin = 0;
    int head_end = 0;
    int block = 0;
    SeqlenInfo info;

    /// False for a slot that no keys fall into. Key blocks ascend with `index`, then heads, then
    /// sequences: deterministic sums wait for CTAs of lower index only.
    __device__ bool find(const AttentionProblem& problem, int head_splits, int64_t index,
                         int block_n) {
        const BlockSlots slots = BlockSlots::keys(problem, block_n);
        int64_t head_split;
        if (problem.is_packed()) {
            const int64_t count = slots.count();
            slot = index % count;
            head_split = index / count;
            batch = slots.batch_of(slot);
            block = static_cast<int>(slot - slots.first_slot(batch));
        } else {
            const int64_t blocks = slots.blocks_per_entry();
            const int64_t heads = int64_t{problem.num_heads_kv} * head_splits;
            block = static_cast<int>(index % blocks);
            head_split = index / blocks % heads;
            batch = index / blocks / heads;
            slot = batch * blocks + block;
        }
        kv_head = static_cast<int>(head_split / head_splits);
        const int heads_per_split = problem.group_size() / head_splits;
        head_begin = kv_head * problem.group_size() +
                     static_cast<int>(head_split % head_splits) * heads_per_split;
        head_end = head_begin + heads_per_split;
        info = seqlen_info_or_uncovered(problem, batch, /*of_queries=*/false);
        return block >= 0 && int64_t{block} * block_n < info.seqlen_k;
    }
};

/// The query blocks that pass by, one (head, block) after the other.
struct QueryStep {
    int head = 0;
    int block = 0;

    __device__ __forceinline__ void advance(const BlockRange& range) {
        if (++block == range.end) {
            block = range.begin;
            ++head;
        }
    }
};

template <class Config>
using QueryLoader = TileLoader<Config::kBlockM, Config::kHeadDim, Config::kThreads>;
template <class Config>
using DoutLoader = TileLoader<Config::kBlockM, Config::kHeadDimV, Config::kThreads>;

/// Where the tiles of a step come from.
template <class Config>
struct QueryTiles {
    const BwdArgs& args;
    const SeqlenInfo& info;
    int64_t first_slot;  // of the sequence's query blocks
    int64_t num_slots;

    __device__ __forceinline__ int64_t row_block(const QueryStep& step) const {
        return step.head * num_slots + first_slot + step.block;
    }

    /// `exists` false: a tile of zeros, and nothing is read.
    __device__ __forceinline__ QueryLoader<Config> q(const QueryStep& step, bool exists) const {
        QueryLoader<Config> loader(q_rows(step), args.params.q_strides.row,
                                   args.params.problem.head_dim / 8);
        loader.begin_tile(exists ? rows_from(step) : 0);
        return loader;
    }
    __device__ __forceinline__ DoutLoader<Config> dout(const QueryStep& step, bool exists) const {
        DoutLoader<Config> loader(dout_rows(step), args.params.dout_strides.row,
                                  args.params.problem.head_dim_v / 8);
        loader.begin_tile(exists && args.params.dout != nullptr ? rows_from(step) : 0);
        return loader;
    }

    /// Whole tiles at once, the rows' LSE and delta with Q.
    __device__ __forceinline__ void load_q(BwdSharedStorage<Config>& shared, uint32_t tile,
                                           const QueryStep& step, int parity) const {
        load_tile<Config::kBlockM, Config::kHeadDim, Config::kThreads>(
            tile, q_rows(step), args.params.q_strides.row, rows_from(step),
            args.params.problem.head_dim / 8);
        load_rows(shared, step, parity);
    }
    __device__ __forceinline__ void load_dout(uint32_t tile, const QueryStep& step) const {
        load_tile<Config::kBlockM, Config::kHeadDimV, Config::kThreads>(
            tile, dout_rows(step), args.params.dout_strides.row,
            args.params.dout != nullptr ? rows_from(step) : 0, args.params.problem.head_dim_v / 8);
    }

    __device__ __forceinline__ int rows_from(const QueryStep& step) const {
        return static_cast<int>(info.seqlen_q) - step.block * Config::kBlockM;
    }
    __device__ __forceinline__ const uint16_t* q_rows(const QueryStep& step) const {
        const int row = step.block * Config::kBlockM;
        return static_cast<const uint16_t*>(args.params.q) +
               tensor_offset(args.params.q_strides, info.batch, info.row_q + row, step.head);
    }
    __device__ __forceinline__ const uint16_t* dout_rows(const QueryStep& step) const {
        const int row = step.block * Config::kBlockM;
        return static_cast<const uint16_t*>(args.params.dout) +
               tensor_offset(args.params.dout_strides, info.batch, info.row_q + row, step.head);
    }

    /// The LSE and delta of the step's rows.
    __device__ __forceinline__ void load_rows(BwdSharedStorage<Config>& shared,
                                              const QueryStep& step, int parity) const {
        constexpr int kUnits = Config::kBlockM / 4;
        const int thread = static_cast<int>(threadIdx.x);
        const int64_t offset = row_block(step) * Config::kBlockM;
        if (thread < kUnits) {
            ptx::cp_async_16(ptx::shared_address(&shared.lse_log2[parity][4 * thread]),
                             args.workspace.lse_log2 + offset + 4 * thread, 16);
        } else if (thread >= 32 && thread < 32 + kUnits) {
            ptx::cp_async_16(ptx::shared_address(&shared.delta[parity][4 * (thread - 32)]),
                             args.workspace.delta + offset + 4 * (thread - 32), 16);
        }
    }
};

}  // namespace sm80
}  // namespace flash_attn_norm
