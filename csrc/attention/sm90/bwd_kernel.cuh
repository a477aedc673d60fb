#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/element.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_config.h"
#include "attention/sm90/bwd_score_terms.cuh"
#include "attention/sm90/wgmma_type.cuh"
#include "ptx/atomic.cuh"
#include "ptx/bulk_store.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/reduction.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// Addresses inside a CTA's shared memory, in its own state space: one register and constants.
template <class Config>
struct BwdAddresses {
    using Shared = BwdSharedStorage<Config>;
    static constexpr int kTileBytes = Config::QLayout::kBytes;
    uint32_t base;

    __device__ __forceinline__ uint32_t k() const { return base + offsetof(Shared, k); }
    __device__ __forceinline__ uint32_t v() const { return base + offsetof(Shared, v); }
    __device__ __forceinline__ uint32_t q(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, q) + s * kTileBytes);
    }
    __device__ __forceinline__ uint32_t dout(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, dout) + s * kTileBytes);
    }
    __device__ __forceinline__ uint32_t ds() const { return base + offsetof(Shared, ds); }
    __device__ __forceinline__ uint32_t dq(int warpgroup) const {
        return base +
               static_cast<uint32_t>(offsetof(Shared, dq) + warpgroup * Config::kDqEntries * 4);
    }
    __device__ __forceinline__ uint32_t lse_log2(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, lse_log2) + s * Config::kBlockM * 4);
    }
    __device__ __forceinline__ uint32_t delta(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, delta) + s * Config::kBlockM * 4);
    }
    __device__ __forceinline__ uint32_t kv_full() const { return base + offsetof(Shared, kv_full); }
    __device__ __forceinline__ uint32_t q_full(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, q_full) + s * 8);
    }
    __device__ __forceinline__ uint32_t q_free(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, q_free) + s * 8);
    }
    __device__ __forceinline__ uint32_t dout_full(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, dout_full) + s * 8);
    }
    __device__ __forceinline__ uint32_t dout_free(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, dout_free) + s * 8);
    }
};

/// Loads K and V. One thread.
template <class Config>
__device__ __forceinline__ void load_keys(const BwdAddresses<Config>& shared, const BwdTile& tile,
                                          const BwdArgs& args) {
    using KLayout = typename Config::KLayout;
    ptx::mbarrier_arrive_expect_tx(shared.kv_full(), 2 * KLayout::kBytes);
#pragma unroll 1
    for (int c = 0; c < KLayout::kChunks; ++c) {
        const int column = c * KLayout::kChunkColumns;
        const uint32_t bytes = static_cast<uint32_t>(c * KLayout::kChunkBytes);
        ptx::tma_load_4d(shared.k() + bytes, &args.k, shared.kv_full(), column, tile.key_row,
                         tile.kv_head, tile.batch);
        ptx::tma_load_4d(shared.v() + bytes, &args.v, shared.kv_full(), column, tile.key_row,
                         tile.kv_head, tile.batch);
    }
}

/// Loads Q with its LSE and dO with its delta, block by block. One thread.
template <class Config>
__device__ __forceinline__ void load_queries(const BwdAddresses<Config>& shared,
                                             const BwdTile& tile, const BwdArgs& args) {
    using QLayout = typename Config::QLayout;
    constexpr uint32_t kRowsBytes = Config::kBlockM * 4;
    const int batch = tile.batch;
    uint32_t count = 0;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        const int64_t first_tile = int64_t{head} * tile.tiles_per_head + tile.first_tile;
#pragma unroll 1
        for (int i = 0; i < tile.end - tile.begin; ++i, ++count) {
            const int block = tile.block(i);
            const int row = tile.query_row + block * Config::kBlockM;
            const int64_t tile_row = (first_tile + block) * Config::kBlockM;
            const int s = static_cast<int>(count % Config::kStages);
            const uint32_t parity = count / Config::kStages % 2 ^ 1;  // the first round is free
            ptx::mbarrier_wait(shared.q_free(s), parity);
            ptx::mbarrier_arrive_expect_tx(shared.q_full(s), QLayout::kBytes + kRowsBytes);
#pragma unroll 1
            for (int c = 0; c < QLayout::kChunks; ++c) {
                ptx::tma_load_4d(shared.q(s) + static_cast<uint32_t>(c * QLayout::kChunkBytes),
                                 &args.q, shared.q_full(s), c * QLayout::kChunkColumns, row, head,
                                 batch);
            }
            ptx::bulk_load(shared.lse_log2(s), args.workspace.lse_log2 + tile_row, kRowsBytes,
                           shared.q_full(s));
            ptx::mbarrier_wait(shared.dout_free(s), parity);
            ptx::mbarrier_arrive_expect_tx(shared.dout_full(s), QLayout::kBytes + kRowsBytes);
#pragma unroll 1
            for (int c = 0; c < QLayout::kChunks; ++c) {
                ptx::tma_load_4d(shared.dout(s) + static_cast<uint32_t>(c * QLayout::kChunkBytes),
                                 &args.dout, shared.dout_full(s), c * QLayout::kChunkColumns, row,
                                 head, batch);
            }
            ptx::bulk_load(shared.delta(s), args.workspace.delta + tile_row, kRowsBytes,
                           shared.dout_full(s));
        }
    }
}

/// How one thread adds to the sums of dQ, query block after query block. `parts` is the block's
/// entry of dq_turn.
///
/// If the first part of a block is stored, so that nobody has to write zeros before, the first CTA
/// that comes claims the block. The others wait until it has stored; it runs, and waits for nobody
/// before it has. Deterministic sums take the key blocks that a query block meets from left to
/// right, each waits for its turn: their CTAs drew lower tickets.
template <class Config>
struct DqOrder {
    bool in_turns, first_stores;
    bool is_first = false;  // this CTA stores

    __device__ __forceinline__ explicit DqOrder(const BwdArgs& args)
        : in_turns(args.params.deterministic), first_stores(args.first_stores_dq) {}

    /// Returns when this CTA may write its part.
    __device__ __forceinline__ void enter(const BwdTile& tile, int* parts, int block, int state) {
        if (in_turns) {
            const int first_key = max(0, block * Config::kBlockM + tile.left);
            const int turn =
                (tile.first_key - first_key / Config::kBlockN * Config::kBlockN) / Config::kBlockN;
            wait_flag(parts, turn);
            is_first = first_stores && turn == 0;
        } else if (first_stores) {
            is_first = state == kNoDq;
            if (state == kDqClaimed) wait_flag(parts, kDqStored);
        }
    }

    __device__ __forceinline__ void write(float* part, uint32_t source) const {
        if (is_first) {
            ptx::bulk_store(part, source, Config::kDqEntries * 4);
        } else {
            ptx::bulk_reduce_add_f32(part, source, Config::kDqEntries * 4);
        }
        ptx::bulk_commit_group();
    }

    __device__ __forceinline__ int claim(int* parts) const {
        if (in_turns || !first_stores || parts == nullptr) return kNoDq;
        const int state = ptx::atom_acquire_cas(parts, kNoDq, kDqClaimed);
        ptx::fence_proxy_async_global();  // what was stored may be added to by the copy engine
        return state;
    }

    /// Says that this CTA's part is in memory, where others wait for it, and claims the next block.
    __device__ __forceinline__ int leave(int* parts, int* next_parts) const {
        int state = kNoDq;
        if (in_turns || is_first) {
            // The claim is on its way while the part is.
            if (!in_turns && next_parts != nullptr) {
                state = ptx::atom_relaxed_cas(next_parts, kNoDq, kDqClaimed);
            }
            ptx::bulk_wait_group<0>();
            ptx::red_release_add(parts, 1);
            return state == kNoDq ? kNoDq : kDqClaimed;  // seen without order: looks again
        }
        return claim(next_parts);
    }
};

/// Adds dQ of each step to the sums in memory, as the consumers put it down. One warp.
template <class Config>
__device__ __forceinline__ void reduce_dq(const BwdAddresses<Config>& shared, const BwdTile& tile,
                                          const BwdArgs& args) {
    constexpr int kTileEntries = Config::kBlockM * Config::kHeadDim;
    const bool leader = threadIdx.x % 32 == 0;
    DqOrder<Config> order(args);
    const int blocks = tile.end - tile.begin;
    int64_t first_tile = int64_t{tile.head_begin} * tile.tiles_per_head + tile.first_tile;
    int* parts = args.workspace.dq_turn + first_tile + tile.start;
    int state = leader && blocks > 0 ? order.claim(parts) : kNoDq;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            const int block = tile.block(i);
            float* sums = args.workspace.dq_accum + (first_tile + block) * kTileEntries;
            if (leader) order.enter(tile, parts, block, state);
#pragma unroll
            for (int w = 0; w < Config::kWarpgroups; ++w) {
                ptx::bar_sync(kDqReady + w, kHandOverThreads);
                if (leader) order.write(sums + w * Config::kDqEntries, shared.dq(w));
            }
#pragma unroll
            for (int w = 0; w < Config::kWarpgroups; ++w) {
                if (leader) {
                    if (w == Config::kWarpgroups - 1) {
                        ptx::bulk_wait_group_read<0>();
                    } else {
                        ptx::bulk_wait_group_read<Config::kWarpgroups - 1>();
                    }
                }
                __syncwarp();
                ptx::bar_arrive(kDqFree + w, kHandOverThreads);
            }
            const bool last_of_head = i + 1 == blocks;
            if (last_of_head) first_tile += tile.tiles_per_head;
            const bool last = last_of_head && head + 1 == tile.head_end;
            int* next_parts =
                last ? nullptr
                     : args.workspace.dq_turn + first_tile + tile.block(last_of_head ? 0 : i + 1);
            if (leader) state = order.leave(parts, next_parts);
            parts = next_parts;
        }
    }
}

/// One thread's view of the consumers' work.
template <class Config>
struct BwdConsumer {
    static constexpr int kHeadDim = Config::kHeadDim;
    static constexpr int kBlockM = Config::kBlockM;
    static constexpr int kBlockN = Config::kBlockN;
    using Element = typename Config::Element;
    using QLayout = typename Config::QLayout;
    using KLayout = typename Config::KLayout;
    using SLayout = typename Config::SLayout;
    static constexpr ptx::WgmmaType kType = wgmma_type<Element>();
    using ScoresMma = ptx::Wgmma<kType, kBlockM>;
    using KeyGradientMma = ptx::Wgmma<kType, kHeadDim>;
    using DqMma = ptx::Wgmma<kType, Config::kDqColumns>;
    static constexpr ptx::Major kInner = ptx::Major::kContraction;
    static constexpr ptx::Major kOuter = ptx::Major::kOuter;

    BwdAddresses<Config> shared;
    int warpgroup;  // of the consumers
    int thread;     // inside the warpgroup
    float dk[kHeadDim / 2], dv[kHeadDim / 2];

    __device__ __forceinline__ explicit BwdConsumer(const BwdAddresses<Config>& addresses)
        : shared(addresses) {
        warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) - 1;
        thread = static_cast<int>(threadIdx.x) - 128 * (warpgroup + 1);
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    }

    __device__ __forceinline__ int lane() const { return thread % 32; }
    /// First of the 16 keys whose scores this thread's warp has.
    __device__ __forceinline__ int warp_key() const { return warpgroup * 64 + thread / 32 * 16; }

    __device__ __forceinline__ void meet() const {
        ptx::bar_sync(kConsumersMeet, Config::kConsumers);
    }

    /// S^T or dP^T of this warpgroup's keys: `keys` is the tile of K or V, `queries` that of Q or
    /// dO.
    __device__ __forceinline__ void scores_mma(float* acc, uint32_t keys, uint32_t queries) const {
        const uint64_t a = KLayout::column_descriptor(
            keys + static_cast<uint32_t>(warpgroup * 64 * KLayout::kRowBytes));
        const uint64_t b = QLayout::column_descriptor(queries);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            ScoresMma::template ss<kInner, kInner>(acc, a + (KLayout::column_step_offset(k) >> 4),
                                                   b + (QLayout::column_step_offset(k) >> 4),
                                                   k != 0);
        }
        ptx::wgmma_commit_group();
    }

    /// dV += P^T dO or dK += dS^T Q over the steps [kBegin, kEnd) of 16 queries, P^T or dS^T
    /// rounded in registers.
    template <int kBegin, int kEnd = kBlockM / 16>
    __device__ __forceinline__ void key_gradient_mma(float* acc, const uint32_t* scores,
                                                     uint32_t queries) const {
        const uint64_t b = QLayout::row_descriptor(queries);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = kBegin; k < kEnd; ++k) {
            KeyGradientMma::template rs<kOuter>(acc, scores + 4 * k,
                                                b + (QLayout::row_step_offset(k) >> 4), 1);
        }
        ptx::wgmma_commit_group();
    }

    /// dQ = dS K: this warpgroup's rows or columns.
    __device__ __forceinline__ void dq_mma(float* acc) const {
        constexpr int kRowBytes = Config::kDqByRows ? 64 * SLayout::kRowBytes : 0;
        constexpr int kColumnBytes =
            Config::kDqByRows ? 0
                              : Config::kDqColumns / KLayout::kChunkColumns * KLayout::kChunkBytes;
        const uint64_t a =
            SLayout::column_descriptor(shared.ds() + static_cast<uint32_t>(warpgroup * kRowBytes));
        const uint64_t b =
            KLayout::row_descriptor(shared.k() + static_cast<uint32_t>(warpgroup * kColumnBytes));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
            DqMma::template ss<kInner, kOuter>(acc, a + (SLayout::column_step_offset(k) >> 4),
                                               b + (KLayout::row_step_offset(k) >> 4), k != 0);
        }
        ptx::wgmma_commit_group();
    }

    /// Sets the scores of rows that do not see their key to -inf.
    __device__ __forceinline__ void mask_scores(float* st, const BwdTile& tile, int block) const {
        const int first_row = block * kBlockM + 2 * (lane() % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = warp_key() + lane() / 4 + 8 * r;
            const int begin = key < tile.keys ? key + tile.row_begin - first_row : kBlockM;
            const int end = key + tile.row_end - first_row;
#pragma unroll
            for (int j = 0; j < kBlockM / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int row = 8 * j + e;
                    if (row < begin || row >= end) st[4 * j + 2 * r + e] = negative_infinity();
                }
            }
        }
    }

    /// The LSE or delta, from `rows`, of this thread's queries of step k.
    __device__ __forceinline__ void load_rows(float2* values, uint32_t rows, int k) const {
        const uint32_t place = rows + static_cast<uint32_t>(lane() % 4 * 8);
        values[2 * k] = ptx::ld_shared_v2_f32(place + 2 * k * 32);
        values[2 * k + 1] = ptx::ld_shared_v2_f32(place + (2 * k + 1) * 32);
    }

    /// S^T -> P^T in place of the rows of step k, 16 queries, and rounded in `p`.
    __device__ __forceinline__ void probabilities(float* st, uint32_t* p, const float2* lse_log2,
                                                  int k, float scale_log2) const {
#pragma unroll
        for (int j = 2 * k; j < 2 * k + 2; ++j) {
            const float2 l = lse_log2[j];
            float* s = st + 4 * j;
            s[0] = ptx::ex2_approx(fmaf(s[0], scale_log2, -l.x));
            s[1] = ptx::ex2_approx(fmaf(s[1], scale_log2, -l.y));
            s[2] = ptx::ex2_approx(fmaf(s[2], scale_log2, -l.x));
            s[3] = ptx::ex2_approx(fmaf(s[3], scale_log2, -l.y));
            p[2 * j] = Element::pack(s[0], s[1]);
            p[2 * j + 1] = Element::pack(s[2], s[3]);
        }
    }

    /// dS^T = P^T (dP^T - delta) of step k, rounded, in registers and in the tile of dS: queries x
    /// keys.
    __device__ __forceinline__ void score_gradients(const float* p, const float* dp, uint32_t* ds,
                                                    const float2* delta, int k) const {
#pragma unroll
        for (int j = 2 * k; j < 2 * k + 2; ++j) {
            const float2 d = delta[j];
            const float *pj = p + 4 * j, *dpj = dp + 4 * j;
            ds[2 * j] = Element::pack(pj[0] * (dpj[0] - d.x), pj[1] * (dpj[1] - d.y));
            ds[2 * j + 1] = Element::pack(pj[2] * (dpj[2] - d.x), pj[3] * (dpj[3] - d.y));
        }
    }
    /// Both at once, with softcap and ALiBi: st holds S^T.
    __device__ __forceinline__ void general_gradients(const BwdScoreTerms& terms, const float* st,
                                                      const float* dp, uint32_t* p, uint32_t* ds,
                                                      int k, int stage, int block) const {
        const uint32_t column = static_cast<uint32_t>(lane() % 4 * 8);
        const int row = block * kBlockM + lane() % 4 * 2, key = warp_key() + lane() / 4;
#pragma unroll
        for (int j = 2 * k; j < 2 * k + 2; ++j) {
            const float2 l = ptx::ld_shared_v2_f32(shared.lse_log2(stage) + column + j * 32);
            const float2 d = ptx::ld_shared_v2_f32(shared.delta(stage) + column + j * 32);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int e = 4 * j + 2 * r;
                float p0, p1, ds0, ds1;
                terms.gradients(st[e], dp[e], row + 8 * j, key + 8 * r, l.x, d.x, p0, ds0);
                terms.gradients(st[e + 1], dp[e + 1], row + 8 * j + 1, key + 8 * r, l.y, d.y, p1,
                                ds1);
                p[2 * j + r] = Element::pack(p0, p1);
                ds[2 * j + r] = Element::pack(ds0, ds1);
            }
        }
    }
    __device__ __forceinline__ void store_score_gradients(const uint32_t* ds, int k) const {
        const int key = warp_key() + (lane() >> 3 & 1) * 8;
        const int row = (lane() & 7) + (lane() >> 4) * 8;
        const uint32_t place =
            shared.ds() + static_cast<uint32_t>(SLayout::unit_offset(row, key / 8));
        ptx::stmatrix_x4_trans(place + k * 16 * SLayout::kRowBytes, ds[4 * k], ds[4 * k + 1],
                               ds[4 * k + 2], ds[4 * k + 3]);
    }

    /// dQ in register order to the buffer from which reduce_dq() takes it; announce_dq() follows.
    __device__ __forceinline__ void store_dq(const float* dq, bool first) const {
        if (!first) ptx::bar_sync(kDqFree + warpgroup, kHandOverThreads);
        const uint32_t buffer = shared.dq(warpgroup) + static_cast<uint32_t>(thread * 16);
#pragma unroll
        for (int i = 0; i < Config::kDqColumns / 8; ++i) {
            ptx::st_shared_v4_f32(buffer + i * 2048, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                                  dq[4 * i + 3]);
        }
    }
    /// Tells reduce_dq() that dQ lies in the buffer. The fence waits until the stores are done, so
    /// products are issued in between.
    __device__ __forceinline__ void announce_dq() const {
        ptx::fence_proxy_async_shared();
        ptx::bar_arrive(kDqReady + warpgroup, kHandOverThreads);
    }

    /// A gradient, rounded, to a tile of keys x head dim.
    __device__ __forceinline__ void store_rows(uint32_t tile, const float* acc, float scale) const {
        const int row = warp_key() + (lane() & 15);
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            const float* x = acc + 8 * k;
            ptx::stmatrix_x4(
                tile + static_cast<uint32_t>(KLayout::unit_offset(row, 2 * k + (lane() >> 4))),
                Element::pack(x[0] * scale, x[1] * scale),
                Element::pack(x[2] * scale, x[3] * scale),
                Element::pack(x[4] * scale, x[5] * scale),
                Element::pack(x[6] * scale, x[7] * scale));
        }
    }

    /// Adds a gradient to sums in memory (head split).
    __device__ __forceinline__ void add_rows(float* sums, const float* acc) const {
        sums += warpgroup * (64 * kHeadDim) + thread * 4;
#pragma unroll
        for (int i = 0; i < kHeadDim / 8; ++i) {
            const float* x = acc + 4 * i;
            ptx::red_add_v4_f32(sums + i * 512, x[0], x[1], x[2], x[3]);
        }
    }
};

/// All query blocks of all heads of this CTA.
template <class Config>
__device__ __forceinline__ void consume_query_tiles(BwdConsumer<Config>& consumer,
                                                    BwdSharedStorage<Config>& storage,
                                                    const BwdArgs& args) {
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
    const BwdAddresses<Config>& shared = consumer.shared;
    const BwdTile& tile = storage.tile;
    const float scale_log2 = args.params.problem.softmax_scale * kLog2E;
    const bool packed = args.params.problem.is_packed();
    uint32_t count = 0;  // steps so far
    int head = tile.head_begin;

    if (tile.has_queries()) ptx::mbarrier_wait(shared.kv_full(), 0);
    if (packed && tile.keys < kBlockN && tile.has_queries()) {
        const int thread = static_cast<int>(threadIdx.x) - 128;
        zero_rows<typename Config::KLayout, Config::kConsumers>(storage.k, tile.keys, thread);
        zero_rows<typename Config::KLayout, Config::kConsumers>(storage.v, tile.keys, thread);
        ptx::fence_proxy_async_shared();
        consumer.meet();
    }

    const auto step = [&](int block, auto masked) {
        const int s = static_cast<int>(count % Config::kStages);
        const uint32_t parity = count / Config::kStages % 2;
        float st[kBlockM / 2], dp[kBlockM / 2];
        ptx::mbarrier_wait(shared.q_full(s), parity);
        if constexpr (decltype(masked)::value) {
            const int rows = tile.seqlen_q - block * kBlockM;
            if (packed && rows < kBlockM) {
                using QLayout = typename Config::QLayout;
                const int thread = static_cast<int>(threadIdx.x) - 128;
                ptx::mbarrier_wait(shared.dout_full(s), parity);
                zero_rows<QLayout, Config::kConsumers>(storage.q[s], rows, thread);
                zero_rows<QLayout, Config::kConsumers>(storage.dout[s], rows, thread);
                ptx::fence_proxy_async_shared();
                consumer.meet();
            }
        }
        // S^T = K Q^T, dP^T = V dO^T
        constexpr int kSteps = kBlockM / 16, kAhead = Config::kRowsAhead;
        // P and its part of dV need not wait for dP.
        constexpr int kEarly = Config::kStreamsScores ? kSteps / 2 : kSteps;
        constexpr int kEarlyDv = Config::kGeneral ? 0 : kEarly;
        float2 lse_log2[2 * kSteps], delta[2 * kSteps];
        const auto load_lse = [&](int k) {
            if (k < kSteps) consumer.load_rows(lse_log2, shared.lse_log2(s), k);
        };
        const auto load_delta = [&](int k) {
            if (k < kSteps) consumer.load_rows(delta, shared.delta(s), k);
        };
        consumer.scores_mma(st, shared.k(), shared.q(s));
#pragma unroll
        for (int k = 0; k < kAhead && !Config::kGeneral; ++k) load_lse(k);
        ptx::mbarrier_wait(shared.dout_full(s), parity);
        consumer.scores_mma(dp, shared.v(), shared.dout(s));
        if (Config::kAnnouncesLate && count != 0) consumer.announce_dq();
        ptx::wgmma_wait_group<1>();
        if constexpr (decltype(masked)::value) consumer.mask_scores(st, tile, block);
        // P = exp2(S * scale_log2 - lse_log2), dS = P * (dP - delta)
        uint32_t p[kBlockM / 4], ds[kBlockM / 4];
        if constexpr (Config::kGeneral) {
            ptx::wgmma_wait_group<0>();
            consumer.meet();  // all are done with the last step's dS
            const auto terms = BwdScoreTerms::make(args.params.problem, tile, head);
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                consumer.general_gradients(terms, st, dp, p, ds, k, s, block);
                consumer.store_score_gradients(ds, k);
            }
        } else {
            const auto probabilities = [&](int k) {
                load_lse(k + kAhead);
                consumer.probabilities(st, p, lse_log2, k, scale_log2);
            };
            const auto gradients = [&](int k) {
                load_delta(k + kAhead);
                consumer.score_gradients(st, dp, ds, delta, k);
            };
#pragma unroll
            for (int k = 0; k < kEarly; ++k) probabilities(k);
#pragma unroll
            for (int k = 0; k < kAhead; ++k) load_delta(k);
            // dV += P^T dO, the part of these steps
            consumer.template key_gradient_mma<0, kEarlyDv>(consumer.dv, p, shared.dout(s));
            ptx::wgmma_wait_group<1>();
#pragma unroll
            for (int k = 0; k < kSteps && !Config::kStreamsScores; ++k) gradients(k);
            consumer.meet();  // all are done with the last step's dS
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                if (k >= kEarly) probabilities(k);
                if (Config::kStreamsScores) gradients(k);
                consumer.store_score_gradients(ds, k);
            }
        }
        // dV, the rest
        if constexpr (kEarlyDv < kSteps) {
            consumer.template key_gradient_mma<kEarlyDv>(consumer.dv, p, shared.dout(s));
        }
        // dK += dS^T Q, a part that runs while the warpgroups meet
        constexpr int kEarlyDk = Config::kEarlyDk;
        consumer.template key_gradient_mma<0, kEarlyDk>(consumer.dk, ds, shared.q(s));
        ptx::fence_proxy_async_shared();
        consumer.meet();  // dS is complete
        // dQ = dS K
        float dq[Config::kDqColumns / 2];
        consumer.dq_mma(dq);
        ptx::wgmma_wait_group<1>();
        if (consumer.thread == 0) ptx::mbarrier_arrive(shared.dout_free(s));
        // dK, the rest
        consumer.template key_gradient_mma<kEarlyDk>(consumer.dk, ds, shared.q(s));
        ptx::wgmma_wait_group<1>();
        consumer.store_dq(dq, count == 0);
        if (!Config::kAnnouncesLate) consumer.announce_dq();
        ptx::wgmma_wait_group<0>();
        if (consumer.thread == 0) ptx::mbarrier_arrive(shared.q_free(s));
        ++count;
    };

    const int end = tile.end, full_begin = tile.full_begin, full_end = tile.full_end;
#pragma unroll 1
    for (; head < tile.head_end; ++head) {
        int block = tile.begin;
#pragma unroll 1
        for (; block < full_begin; ++block) step(block, std::true_type{});
#pragma unroll 1
        for (; block < full_end; ++block) step(block, std::false_type{});
#pragma unroll 1
        for (; block < end; ++block) step(block, std::true_type{});
    }
    if (Config::kAnnouncesLate && count != 0) consumer.announce_dq();
}

/// Writes dK and dV of the CTA's keys, or adds them to those of the group's other CTAs.
template <class Config>
__device__ __forceinline__ void store_key_gradients(BwdConsumer<Config>& consumer,
                                                    const BwdSharedStorage<Config>& storage,
                                                    const BwdArgs& args) {
    using KLayout = typename Config::KLayout;
    const AttentionProblem& problem = args.params.problem;
    const BwdAddresses<Config>& shared = consumer.shared;
    const BwdTile& tile = storage.tile;
    if (args.head_splits > 1) {
        if (!tile.has_queries()) return;
        const int64_t first = int64_t{tile.accum_tile} * (Config::kBlockN * Config::kHeadDim);
        consumer.add_rows(args.workspace.dk_accum + first, consumer.dk);
        consumer.add_rows(args.workspace.dv_accum + first, consumer.dv);
        return;
    }
    consumer.meet();  // all are done with K and V
    consumer.store_rows(shared.k(), consumer.dk, problem.softmax_scale);
    consumer.store_rows(shared.v(), consumer.dv, 1.0f);
    ptx::fence_proxy_async_shared();
    consumer.meet();
    store_gradient_tile<KLayout, Config::kConsumers>(storage.k, &args.dk, args.params.dk,
                                                     problem.head_dim, tile, problem);
    store_gradient_tile<KLayout, Config::kConsumers>(storage.v, &args.dv, args.params.dv,
                                                     problem.head_dim_v, tile, problem);
    if (threadIdx.x == 128) {
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();  // the CTA's shared memory must last until then
    }
}

template <class Config>
__device__ __forceinline__ void init_barriers(const BwdAddresses<Config>& shared) {
    ptx::mbarrier_init(shared.kv_full(), 1);
    for (int i = 0; i < Config::kStages; ++i) {
        ptx::mbarrier_init(shared.q_full(i), 1);
        ptx::mbarrier_init(shared.dout_full(i), 1);
        ptx::mbarrier_init(shared.q_free(i), Config::kWarpgroups);
        ptx::mbarrier_init(shared.dout_free(i), Config::kWarpgroups);
    }
    ptx::fence_mbarrier_init();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& storage = *reinterpret_cast<BwdSharedStorage<Config>*>(shared_bytes);
    const BwdAddresses<Config> shared{ptx::shared_address(shared_bytes)};
    if (threadIdx.x == 0) {
        if (shared.base % 1024 != 0) __trap();
        init_barriers(shared);
        ptx::prefetch_tensormap(&args.q);
        ptx::prefetch_tensormap(&args.k);
        ptx::prefetch_tensormap(&args.v);
        ptx::prefetch_tensormap(&args.dout);
        // Sums in turns wait for CTAs of lower index, so an index is drawn only when its CTA runs.
        const int index = args.params.deterministic ? atomicAdd(args.workspace.counters, 1)
                                                    : static_cast<int>(blockIdx.x);
        storage.tile =
            BwdTile::make<Config::kBlockN, Config::kBlockN, Config::kBlockM>(args, index, 0);
        if (storage.tile.has_queries()) load_keys(shared, storage.tile, args);
    }
    __syncthreads();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();  // for LSE, delta and dq_turn; before any return
    const BwdTile& tile = storage.tile;
    if (!tile.used()) return;

    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<Config::kLoaderRegisters>();
        if (threadIdx.x == 0) {
            if (tile.has_queries()) load_queries(shared, tile, args);
        } else if (threadIdx.x / 32 == 1) {
            reduce_dq(shared, tile, args);
        }
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        BwdConsumer<Config> consumer(shared);
        // Not under a condition: a second way to the sums of 0 costs copies of all of them.
        consume_query_tiles(consumer, storage, args);
        store_key_gradients(consumer, storage, args);
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
