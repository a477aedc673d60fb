#pragma once

#include <cstdint>

#include "attention/sm80/bwd_scores.cuh"
#include "ptx/reduction.cuh"

namespace flash_attn_norm {
namespace sm80 {

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

/// Starts the copy of a step's bias, if the kernel has it and `tile` is not null.
template <class Config>
__device__ __forceinline__ void load_bias(unsigned char* tile, const BwdArgs& args,
                                          const BwdBlock& place, const QueryStep& step) {
    if constexpr (Config::kGeneral) {
        if (tile == nullptr) return;
        const Bias bias = Bias::make(args.params.problem, place.info, step.head);
        BwdBiasTile<Config>::load(ptx::shared_address(tile), bias, args.bias_unit,
                                  step.block * Config::kBlockM, place.block * Config::kBlockN);
        ptx::cp_async_commit_group();
    }
}

/// All query blocks of all heads of this CTA. In two parts, each of them is two steps: of parity 0
/// and 1.
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
    unsigned char* bias_tile = args.bias_unit > 0
                                   ? reinterpret_cast<unsigned char*>(&shared) +
                                         Shared::bytes(args.q_stages, args.dout_stages)
                                   : nullptr;

    QueryStep step{place.head_begin, range.begin};
    tiles.load_q(shared, first_q, step, 0);
    tiles.load_dout(first_dout, step);
    load_bias<Config>(bias_tile, args, place, step);
    ptx::cp_async_commit_group();

    for (int parity = 0; step.head < place.head_end; parity ^= 1) {
        QueryStep next = step;
        if (!Config::kGeneral || parity >= args.last_part) next.advance(range);
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
            const bool is_first_part = (parity & args.last_part) == 0;
            if (bias_columns_only && step.block == range.begin && is_first_part) {  // a new head
                BiasGradient::clear_columns<Config::kWarpsSM, Config::kBlockN>(shared.bias_sum);
            }
        }
        const bool spread_loads = Config::kSpreadLoads && two_q && two_dout;
        if (!spread_loads) {
            if (two_q && has_next) tiles.load_q(shared, next_q, next, parity ^ 1);
            if (two_dout && has_next) tiles.load_dout(next_dout, next);
            ptx::cp_async_commit_group();
            score_step(shared, warp, q, dout, bias_tile, args, place, step, bounds, parity,
                       ragged || range.masked(step.block), Nothing{});
        } else if constexpr (Config::kSpreadLoads) {
            if (has_next) tiles.load_rows(shared, next, parity ^ 1);
            QueryLoader<Config> q_loader = tiles.q(next, has_next);
            DoutLoader<Config> dout_loader = tiles.dout(next, has_next);
            score_step(shared, warp, q, dout, bias_tile, args, place, step, bounds, parity,
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
        __syncthreads();  // P and dS are there, the bias is free
        if (has_next) load_bias<Config>(bias_tile, args, place, next);

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
        if (args.params.deterministic && (!Config::kGeneral || parity >= args.last_part)) {
            pass_turn(turn);
        }
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
