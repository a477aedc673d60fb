#pragma once

#include <cstdint>

#include "attention/bwd_workspace.h"
#include "attention/sm80/bwd_bias.cuh"
#include "attention/sm80/config.h"
#include "attention/sm80/tile_copy.cuh"
#include "attention/sm80/warp_mma.cuh"
#include "ptx/reduction.cuh"
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

/// S -> P, rounded into shared memory, and dP -> dS, in place, rounded into shared memory.
template <class Config>
__device__ __forceinline__ void score_gradients(
    BwdSharedStorage<Config>& shared, float (&acc_s)[Config::kTilesSM][Config::kTilesSN][4],
    float (&acc_dp)[Config::kTilesSM][Config::kTilesSN][4], float scale_log2, int parity,
    int tile_row, int tile_column) {
    using Element = typename Config::Element;
#pragma unroll
    for (int m = 0; m < Config::kTilesSM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = tile_row + 16 * m + 8 * r;
            const float lse = shared.lse_log2[parity][row];
            const float delta = shared.delta[parity][row];
            uint32_t* p_row =
                reinterpret_cast<uint32_t*>(&shared.p[row * Config::kPitchS + tile_column]);
            uint32_t* ds_row =
                reinterpret_cast<uint32_t*>(&shared.ds[row * Config::kPitchS + tile_column]);
#pragma unroll
            for (int n = 0; n < Config::kTilesSN; ++n) {
                const int e = 2 * r;
                const float p0 = ptx::ex2_approx(fmaf(acc_s[m][n][e], scale_log2, -lse));
                const float p1 = ptx::ex2_approx(fmaf(acc_s[m][n][e + 1], scale_log2, -lse));
                p_row[4 * n] = Element::pack(p0, p1);
                ds_row[4 * n] = Element::pack(p0 * (acc_dp[m][n][e] - delta),
                                              p1 * (acc_dp[m][n][e + 1] - delta));
            }
        }
    }
}

/// The same with score terms and dropout. Afterwards acc_dp holds d loss / d (scores after softcap)
/// and acc_s the slope of the softcap, 1 without one; dS in shared memory is their product.
template <class Config>
__device__ __forceinline__ void score_gradients_general(
    BwdSharedStorage<Config>& shared, float (&acc_s)[Config::kTilesSM][Config::kTilesSN][4],
    float (&acc_dp)[Config::kTilesSM][Config::kTilesSN][4], const ScoreTerms& terms,
    const Dropout& dropout, float keep_scale, int parity, int tile_row, int tile_column, int row,
    int key) {
    using Element = typename Config::Element;
    // Dropped entries are marked by a negative gradient of P that no other entry can have: -inf.
    if (dropout.drop_below > 0) {
        for_each_dropout(acc_dp, row, key, dropout, [&](float& dp, bool keep) {
            dp = keep ? dp * keep_scale : negative_infinity();
        });
    }
#pragma unroll
    for (int m = 0; m < Config::kTilesSM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int tile_i = tile_row + 16 * m + 8 * r;
            const float lse = shared.lse_log2[parity][tile_i];
            const float delta = shared.delta[parity][tile_i];
#pragma unroll
            for (int n = 0; n < Config::kTilesSN; ++n) {
                float p_kept[2], ds[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = acc_s[m][n][2 * r + e];
                    float& dp = acc_dp[m][n][2 * r + e];
                    float slope = 1.0f, score = s;
                    if (score != negative_infinity()) {  // masked
                        score = terms.score(s, row + 16 * m + 8 * r, key + 8 * n + e, slope);
                    }
                    const float p = ptx::ex2_approx(fmaf(score, kLog2E, -lse));
                    const bool dropped = dp == negative_infinity();
                    p_kept[e] = dropped ? 0.0f : p;
                    dp = p * ((dropped ? 0.0f : dp) - delta);
                    s = slope;
                    ds[e] = dp * slope;
                }
                const int offset = tile_i * Config::kPitchS + tile_column + 8 * n;
                *reinterpret_cast<uint32_t*>(&shared.p[offset]) =
                    Element::pack(p_kept[0], p_kept[1]);
                *reinterpret_cast<uint32_t*>(&shared.ds[offset]) = Element::pack(ds[0], ds[1]);
            }
        }
    }
}

/// The sums of one CTA, and where this warp's parts of each product lie.
template <class Config>
struct BwdWarp {
    static constexpr BwdTile kTile = Config::kTile;

    int lane, warp;
    int s_row, s_column;   // first query and key of the warp's scores
    int kv_row, kv_group;  // first key of the warp's part of dK and dV, its share of head dims
    int q_row, q_column;   // of dQ
    float acc_dk[Config::kTilesKvN][Config::kTilesKD][4];
    float acc_dv[Config::kTilesKvN][Config::kTilesVD][4];

    __device__ BwdWarp() {
        warp = static_cast<int>(threadIdx.x) / 32;
        lane = static_cast<int>(threadIdx.x) % 32;
        s_row = warp % kTile.warps_s_m * (Config::kTilesSM * 16);
        s_column = warp / kTile.warps_s_m * (Config::kTilesSN * 8);
        kv_row = warp % kTile.warps_kv_n * (Config::kTilesKvN * 16);
        kv_group = warp / kTile.warps_kv_n;
        q_row = warp % kTile.warps_q_m * (Config::kTilesQM * 16);
        q_column = warp / kTile.warps_q_m * (Config::kTilesQD * 8);
        clear(acc_dk);
        clear(acc_dv);
    }
};

constexpr Layout kInner = Layout::kContractionInner;
constexpr Layout kOuter = Layout::kContractionOuter;

/// dV += P^T dO or dK += dS^T Q: `scores` is P or dS, `operand` the tile of dO or Q.
template <class Config, int kPitchB, int kTilesN, int kTilesD, class Between = Nothing>
__device__ __forceinline__ void add_key_gradient(float (&acc)[kTilesN][kTilesD][4],
                                                 const BwdWarp<Config>& warp,
                                                 const uint16_t* scores, uint32_t operand,
                                                 Between&& between = {}) {
    gemm<typename Config::Element, kOuter, Config::kPitchS, kOuter, kPitchB, Config::kBlockM / 16>(
        acc, a_base<kOuter, Config::kPitchS>(ptx::shared_address(scores + warp.kv_row), warp.lane),
        b_base<kOuter, kPitchB>(operand + static_cast<uint32_t>(warp.kv_group * kTilesD * 8 * 2),
                                warp.lane),
        between);
}

/// dQ = dS K of one block of query rows.
template <class Config>
__device__ __forceinline__ void query_gradient(
    float (&acc_dq)[Config::kTilesQM][Config::kTilesQD][4], const BwdSharedStorage<Config>& shared,
    const BwdWarp<Config>& warp) {
    clear(acc_dq);
    gemm<typename Config::Element, kInner, Config::kPitchS, kOuter, Config::kPitch,
         Config::kBlockN / 16>(
        acc_dq,
        a_base<kInner, Config::kPitchS>(
            ptx::shared_address(&shared.ds[warp.q_row * Config::kPitchS]), warp.lane),
        b_base<kOuter, Config::kPitch>(ptx::shared_address(&shared.k[warp.q_column]), warp.lane));
}

/// Adds part `part` of kParts of a warp's accumulator tile to sums in memory, laid out as
/// AccumulatorLayout says.
template <int kThreads, int kParts, int kTilesM, int kTilesN>
__device__ __forceinline__ void add_accumulator(float* sums,
                                                const float (&acc)[kTilesM][kTilesN][4], int part) {
    constexpr int kEntries = kTilesM * kTilesN * 4 / kParts;
    static_assert(kEntries * kParts == kTilesM * kTilesN * 4, "parts of one size");
    sums += threadIdx.x;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
        const int entry = part * kEntries + i;
        ptx::red_add_f32(sums + entry * kThreads,
                         acc[entry / 4 / kTilesN][entry / 4 % kTilesN][entry % 4]);
    }
}

/// The scores of one step and their gradients: fills shared.p and shared.ds. between(i) runs among
/// the products of S, see gemm.
template <class Config, class Between>
__device__ __forceinline__ void score_step(BwdSharedStorage<Config>& shared,
                                           const BwdWarp<Config>& warp, uint32_t q, uint32_t dout,
                                           const BwdArgs& args, const BwdBlock& place,
                                           const QueryStep& step, const RowBounds& bounds,
                                           int parity, bool masked, Between&& between) {
    using Element = typename Config::Element;
    const AttentionProblem& problem = args.params.problem;
    const bool works = Config::kWarpsS == Config::kTile.warps || warp.warp < Config::kWarpsS;
    float acc_s[Config::kTilesSM][Config::kTilesSN][4];
    float acc_dp[Config::kTilesSM][Config::kTilesSN][4];
    const int tile_row = warp.s_row + warp.lane / 4;
    const int tile_column = warp.s_column + 2 * (warp.lane % 4);
    const int row = step.block * Config::kBlockM + tile_row;
    const int key = place.block * Config::kBlockN + tile_column;
    if (works) {
        // S = Q K^T, dP = dO V^T
        clear(acc_s);
        clear(acc_dp);
        gemm<Element, kInner, Config::kPitch, kInner, Config::kPitch, Config::kHeadDim / 16>(
            acc_s,
            a_base<kInner, Config::kPitch>(
                q + static_cast<uint32_t>(warp.s_row * Config::kPitch * 2), warp.lane),
            b_base<kInner, Config::kPitch>(
                ptx::shared_address(&shared.k[warp.s_column * Config::kPitch]), warp.lane),
            between);
        if (masked) apply_mask(acc_s, row, key, bounds);
        gemm<Element, kInner, Config::kPitchV, kInner, Config::kPitchV, Config::kHeadDimV / 16>(
            acc_dp,
            a_base<kInner, Config::kPitchV>(
                dout + static_cast<uint32_t>(warp.s_row * Config::kPitchV * 2), warp.lane),
            b_base<kInner, Config::kPitchV>(
                ptx::shared_address(&shared.v[warp.s_column * Config::kPitchV]), warp.lane));
        // P = exp2(S * scale_log2 - lse_log2), dS = P * (dP - delta)
        if constexpr (Config::kGeneral) {
            // Made here, not before the loop: they would occupy registers during the products.
            const ScoreTerms terms = ScoreTerms::make(problem, place.info, place.batch, step.head);
            Dropout dropout;
            if (problem.dropout_p > 0.0f) {
                dropout = Dropout::make(problem.rng_state, problem.dropout_p,
                                        place.batch * problem.num_heads_q + step.head);
            }
            score_gradients_general(shared, acc_s, acc_dp, terms, dropout,
                                    1.0f / (1.0f - problem.dropout_p), parity, tile_row,
                                    tile_column, row, key);
        } else {
            score_gradients(shared, acc_s, acc_dp, problem.softmax_scale * kLog2E, parity, tile_row,
                            tile_column);
        }
    }
    if constexpr (Config::kGeneral) {
        if (args.params.dattn_bias == nullptr) return;
        const BiasGradient bias =
            BiasGradient::make(args.params, args.workspace, place.info, place.batch, step.head,
                               place.block, Config::kBlockM, Config::kBlockN);
        if (bias.columns != nullptr && works) {
            BiasGradient::add_columns(acc_dp, shared.bias_sum[warp.warp % Config::kWarpsSM],
                                      tile_column, warp.lane);
        } else if (bias.rows != nullptr) {
            int* turn = bias.turns == nullptr ? nullptr
                                              : bias.turns + int64_t{step.block} * bias.turn_stride;
            if (turn != nullptr) wait_for_turn(turn, bias.turn);
            if (works) bias.add_rows(acc_dp, row, key);
            if (turn != nullptr) pass_turn(turn);
        }
    }
}

/// All query blocks of all heads of this CTA.
template <class Config>
__device__ __forceinline__ void consume_query_tiles(BwdSharedStorage<Config>& shared,
                                                    BwdWarp<Config>& warp, const BwdArgs& args,
                                                    const BwdBlock& place, const Mask& mask,
                                                    const BlockRange& range) {
    using Shared = BwdSharedStorage<Config>;
    const AttentionProblem& problem = args.params.problem;
    const BlockSlots slots = BlockSlots::queries(problem, Config::kBlockM);
    const QueryTiles<Config> tiles{args, place.info, slots.first_slot(place.batch), slots.count()};
    const RowBounds bounds = RowBounds::make(mask);
    const bool bias_columns_only =
        args.params.dattn_bias != nullptr && args.params.dattn_bias_strides.row == 0;
    const bool ragged = int64_t{place.block + 1} * Config::kBlockN > place.info.seqlen_k;
    const bool two_q = args.q_stages == 2, two_dout = args.dout_stages == 2;
    const uint32_t first_q = ptx::shared_address(&shared) + Shared::fixed_bytes();
    const uint32_t first_dout = first_q + static_cast<uint32_t>(args.q_stages * Shared::kQBytes);

    QueryStep step{place.head_begin, range.begin};
    tiles.load_q(shared, first_q, step, 0);
    tiles.load_dout(first_dout, step);
    ptx::cp_async_commit_group();

    for (int parity = 0; step.head < place.head_end; parity ^= 1) {
        QueryStep next = step;
        next.advance(range);
        const bool has_next = next.head < place.head_end;
        const uint32_t q = first_q + static_cast<uint32_t>(two_q ? parity * Shared::kQBytes : 0);
        const uint32_t dout =
            first_dout + static_cast<uint32_t>(two_dout ? parity * Shared::kDoutBytes : 0);
        const uint32_t next_q =
            first_q + static_cast<uint32_t>(two_q ? (parity ^ 1) * Shared::kQBytes : 0);
        const uint32_t next_dout =
            first_dout + static_cast<uint32_t>(two_dout ? (parity ^ 1) * Shared::kDoutBytes : 0);

        ptx::cp_async_wait_group<0>();
        __syncthreads();  // this step's tiles are there, the last step's are free

        if constexpr (Config::kGeneral) {
            if (bias_columns_only && step.block == range.begin) {  // a new head
                BiasGradient::clear_columns<Config::kWarpsSM, Config::kBlockN>(shared.bias_sum);
            }
        }
        const bool spread_loads = Config::kSpreadLoads && two_q && two_dout;
        if (!spread_loads) {
            if (two_q && has_next) tiles.load_q(shared, next_q, next, parity ^ 1);
            if (two_dout && has_next) tiles.load_dout(next_dout, next);
            ptx::cp_async_commit_group();
            score_step(shared, warp, q, dout, args, place, step, bounds, parity,
                       ragged || range.masked(step.block), Nothing{});
        } else if constexpr (Config::kSpreadLoads) {
            if (has_next) tiles.load_rows(shared, next, parity ^ 1);
            QueryLoader<Config> q_loader = tiles.q(next, has_next);
            DoutLoader<Config> dout_loader = tiles.dout(next, has_next);
            score_step(shared, warp, q, dout, args, place, step, bounds, parity,
                       ragged || range.masked(step.block), [&](int slot) {
                           constexpr int kQ = QueryLoader<Config>::kSteps;
                           constexpr int kAll = kQ + DoutLoader<Config>::kSteps;
                           constexpr int kSlots = Config::kHeadDim / 16 * Config::kTilesSN / 2;
                           spread<kAll, kSlots>(slot, [&](int i) {
                               if (i < kQ) {
                                   q_loader.step(i, next_q);
                               } else {
                                   dout_loader.step(i - kQ, next_dout);
                               }
                           });
                       });
            ptx::cp_async_commit_group();
        }
        __syncthreads();  // P and dS are there

        // dV += P^T dO
        add_key_gradient<Config, Config::kPitchV>(warp.acc_dv, warp, shared.p, dout);
        if (!two_dout && has_next) {
            __syncthreads();  // dO is free
            tiles.load_dout(next_dout, next);
            ptx::cp_async_commit_group();
        }
        // dQ += dS K; its sums leave for memory among the products of dK += dS^T Q
        float acc_dq[Config::kTilesQM][Config::kTilesQD][4];
        query_gradient(acc_dq, shared, warp);
        const int64_t row_block = tiles.row_block(step);
        int* turn = args.workspace.dq_turn + row_block;
        if (args.params.deterministic) {
            // Key blocks that these rows see go from left to right.
            const int64_t row = int64_t{step.block} * Config::kBlockM;
            const int64_t row_end = row + Config::kBlockM;
            const BlockRange keys = key_blocks(
                mask, row, row_end < mask.seqlen_q ? row_end : mask.seqlen_q, Config::kBlockN);
            wait_for_turn(turn, place.block - keys.begin);
        }
        float* dq_sums = args.workspace.dq_accum + row_block * (Config::kBlockM * Config::kHeadDim);
        add_key_gradient<Config, Config::kPitch>(warp.acc_dk, warp, shared.ds, q, [&](int part) {
            constexpr int kParts = Config::kBlockM / 16 * Config::kTilesKD / 2;
            add_accumulator<Config::kThreads, kParts>(dq_sums, acc_dq, part);
        });
        if (args.params.deterministic) pass_turn(turn);
        if (!two_q && has_next) {
            __syncthreads();  // Q is free
            tiles.load_q(shared, next_q, next, parity ^ 1);
            ptx::cp_async_commit_group();
        }

        if constexpr (Config::kGeneral) {
            if (bias_columns_only && next.head != step.head) {
                BiasGradient::make(args.params, args.workspace, place.info, place.batch, step.head,
                                   place.block, Config::kBlockM, Config::kBlockN)
                    .store_columns(shared.bias_sum, place.block * Config::kBlockN);
            }
        }
        step = next;
    }
    if (Config::kSpreadLoads) ptx::cp_async_wait_group<0>();
}

/// Stores a tile of dK or dV through shared memory, where its K or V was.
template <class Config, int kColumns, int kTilesN, int kTilesD>
__device__ __forceinline__ void store_key_gradient(uint16_t* tile, const BwdWarp<Config>& warp,
                                                   float (&acc)[kTilesN][kTilesD][4], float scale,
                                                   void* gradient, const BwdBlock& place,
                                                   int64_t seqlen_k, int num_heads, int head_dim) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[n][d][e] *= scale;
        }
    }
    constexpr int kPitch = pitch_of(kColumns);
    accumulator_to_tile<typename Config::Element, kPitch>(
        tile + warp.kv_row * kPitch + warp.kv_group * (kTilesD * 8), acc, warp.lane);
    __syncthreads();
    const int first_row = place.block * Config::kBlockN;
    const int64_t row_stride = int64_t{num_heads} * head_dim;
    const int64_t row = place.info.batch * seqlen_k + place.info.row_k + first_row;
    store_tile<Config::kBlockN, kColumns, Config::kThreads>(
        static_cast<uint16_t*>(gradient) + row * row_stride + int64_t{place.kv_head} * head_dim,
        row_stride, tile, static_cast<int>(place.info.seqlen_k) - first_row, head_dim / 8);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdArgs args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<BwdSharedStorage<Config>*>(shared_bytes);
    const AttentionBwdParams& params = args.params;
    const AttentionProblem& problem = params.problem;

    int64_t index = blockIdx.x;
    if (params.deterministic) {
        // Sums wait for CTAs of lower index, so an index is drawn only when its CTA runs.
        if (threadIdx.x == 0) shared.tile_index = atomicAdd(args.workspace.counters, 1);
        __syncthreads();
        index = shared.tile_index;
    }
    BwdBlock place;
    if (!place.find(problem, args.head_splits, index, Config::kBlockN)) return;
    const SeqlenInfo& info = place.info;
    const int64_t first_key = int64_t{place.block} * Config::kBlockN;
    const int64_t key_end = first_key + Config::kBlockN;
    const int keys = static_cast<int>(info.seqlen_k - first_key);
    const Mask mask{info.seqlen_q, info.seqlen_k, problem.window_left, problem.window_right};
    const BlockRange range = query_blocks(
        mask, first_key, key_end < info.seqlen_k ? key_end : info.seqlen_k, Config::kBlockM);

    BwdWarp<Config> warp;
    if (range.begin < range.end) {
        load_tile<Config::kBlockN, Config::kHeadDim, Config::kThreads>(
            ptx::shared_address(shared.k),
            static_cast<const uint16_t*>(params.k) +
                tensor_offset(params.k_strides, info.batch, info.row_k + first_key, place.kv_head),
            params.k_strides.row, keys, problem.head_dim / 8);
        load_tile<Config::kBlockN, Config::kHeadDimV, Config::kThreads>(
            ptx::shared_address(shared.v),
            static_cast<const uint16_t*>(params.v) +
                tensor_offset(params.v_strides, info.batch, info.row_k + first_key, place.kv_head),
            params.v_strides.row, keys, problem.head_dim_v / 8);
        consume_query_tiles(shared, warp, args, place, mask, range);
    }
    if (args.head_splits > 1) {
        const int64_t tile =
            place.kv_head * BlockSlots::keys(problem, Config::kBlockN).count() + place.slot;
        if (range.begin < range.end) {
            add_accumulator<Config::kThreads, 1>(
                args.workspace.dk_accum + tile * (Config::kBlockN * Config::kHeadDim), warp.acc_dk,
                0);
            add_accumulator<Config::kThreads, 1>(
                args.workspace.dv_accum + tile * (Config::kBlockN * Config::kHeadDimV), warp.acc_dv,
                0);
        }
        return;
    }
    __syncthreads();  // K and V are free
    store_key_gradient<Config, Config::kHeadDim>(shared.k, warp, warp.acc_dk, problem.softmax_scale,
                                                 params.dk, place, problem.seqlen_k,
                                                 problem.num_heads_kv, problem.head_dim);
    store_key_gradient<Config, Config::kHeadDimV>(
        shared.v, warp, warp.acc_dv, 1.0f / (1.0f - problem.dropout_p), params.dv, place,
        problem.seqlen_k, problem.num_heads_kv, problem.head_dim_v);
}

}  // namespace sm80
}  // namespace flash_attn_norm
