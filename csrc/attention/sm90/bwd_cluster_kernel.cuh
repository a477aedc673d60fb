#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/element.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_cluster_config.h"
#include "attention/sm90/bwd_score_terms.cuh"
#include "attention/sm90/wgmma_type.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cluster.cuh"
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
struct BwdClusterAddresses {
    using Shared = BwdClusterStorage<Config>;
    uint32_t base;

    __device__ __forceinline__ uint32_t k() const { return at(offsetof(Shared, k)); }
    __device__ __forceinline__ uint32_t v() const { return at(offsetof(Shared, v)); }
    __device__ __forceinline__ uint32_t partner_k() const {
        return at(offsetof(Shared, partner_k));
    }
    __device__ __forceinline__ uint32_t q(int s) const {
        return at(offsetof(Shared, q) + s * Config::QLayout::kBytes);
    }
    __device__ __forceinline__ uint32_t dout() const { return at(offsetof(Shared, dout)); }
    __device__ __forceinline__ uint32_t p() const { return at(offsetof(Shared, p)); }
    __device__ __forceinline__ uint32_t ds() const { return at(offsetof(Shared, ds)); }
    __device__ __forceinline__ uint32_t partner_ds() const {
        return at(offsetof(Shared, partner_ds));
    }
    __device__ __forceinline__ uint32_t lse_log2(int s) const {
        return at(offsetof(Shared, lse_log2) + s * Config::kBlockM * 4);
    }
    __device__ __forceinline__ uint32_t delta() const { return at(offsetof(Shared, delta)); }
    __device__ __forceinline__ uint32_t kv_full() const { return at(offsetof(Shared, kv_full)); }
    __device__ __forceinline__ uint32_t q_full(int s) const {
        return at(offsetof(Shared, q_full) + s * 8);
    }
    __device__ __forceinline__ uint32_t q_free(int s) const {
        return at(offsetof(Shared, q_free) + s * 8);
    }
    __device__ __forceinline__ uint32_t dout_full() const {
        return at(offsetof(Shared, dout_full));
    }
    __device__ __forceinline__ uint32_t dout_free() const {
        return at(offsetof(Shared, dout_free));
    }
    __device__ __forceinline__ uint32_t ds_full() const { return at(offsetof(Shared, ds_full)); }
    __device__ __forceinline__ uint32_t ds_free() const { return at(offsetof(Shared, ds_free)); }
    __device__ __forceinline__ uint32_t dq_go(uint32_t parity) const {
        return at(offsetof(Shared, dq_go) + parity * 8);
    }

  private:
    __device__ __forceinline__ uint32_t at(size_t offset) const {
        return base + static_cast<uint32_t>(offset);
    }
};

/// Copies a tile of Layout, chunk by chunk from column `column` on.
template <class Layout>
__device__ __forceinline__ void load_chunks(uint32_t destination, const CUtensorMap* map,
                                            uint32_t barrier, int column, int row, int head,
                                            int batch) {
#pragma unroll 1
    for (int c = 0; c < Layout::kChunks; ++c) {
        ptx::tma_load_4d(destination + static_cast<uint32_t>(c * Layout::kChunkBytes), map, barrier,
                         column + c * Layout::kChunkColumns, row, head, batch);
    }
}

/// Loads K, V and the partner's K. One thread.
template <class Config>
__device__ __forceinline__ void load_keys(const BwdClusterAddresses<Config>& shared,
                                          const BwdTile& tile, const BwdArgs& args, int rank) {
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    using PartnerKLayout = typename Config::PartnerKLayout;
    const int batch = tile.batch;
    const int partner_row = tile.key_row + (rank == 0 ? Config::kBlockN : -Config::kBlockN);
    const uint32_t kv_full = shared.kv_full();
    ptx::mbarrier_arrive_expect_tx(kv_full,
                                   KLayout::kBytes + VLayout::kBytes + PartnerKLayout::kBytes);
    load_chunks<KLayout>(shared.k(), &args.k, kv_full, 0, tile.key_row, tile.kv_head, batch);
    load_chunks<VLayout>(shared.v(), &args.v, kv_full, 0, tile.key_row, tile.kv_head, batch);
    load_chunks<PartnerKLayout>(shared.partner_k(), &args.k, kv_full, rank * Config::kHeadDim / 2,
                                partner_row, tile.kv_head, batch);
}

/// Loads Q with its LSE and dO with its delta, block by block. One thread.
template <class Config>
__device__ __forceinline__ void load_queries(const BwdClusterAddresses<Config>& shared,
                                             const BwdTile& tile, const BwdArgs& args) {
    using QLayout = typename Config::QLayout;
    using DoutLayout = typename Config::DoutLayout;
    constexpr uint32_t kRowsBytes = Config::kBlockM * 4;
    const int batch = tile.batch;
    uint32_t count = 0;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        int row = tile.query_row + tile.begin * Config::kBlockM;
        int64_t tile_row =
            (int64_t{head} * tile.tiles_per_head + tile.first_tile + tile.begin) * Config::kBlockM;
#pragma unroll 1
        for (int block = tile.begin; block < tile.end; ++block, ++count) {
            const int s = static_cast<int>(count % Config::kStages);
            // The first round finds everything free.
            wait_barrier(shared.q_free(s), count / Config::kStages % 2 ^ 1);
            ptx::mbarrier_arrive_expect_tx(shared.q_full(s), QLayout::kBytes + kRowsBytes);
            load_chunks<QLayout>(shared.q(s), &args.q, shared.q_full(s), 0, row, head, batch);
            ptx::bulk_load(shared.lse_log2(s), args.workspace.lse_log2 + tile_row, kRowsBytes,
                           shared.q_full(s));
            wait_barrier(shared.dout_free(), count % 2 ^ 1);
            ptx::mbarrier_arrive_expect_tx(shared.dout_full(), DoutLayout::kBytes + kRowsBytes);
            load_chunks<DoutLayout>(shared.dout(), &args.dout, shared.dout_full(), 0, row, head,
                                    batch);
            ptx::bulk_load(shared.delta(), args.workspace.delta + tile_row, kRowsBytes,
                           shared.dout_full());
            row += Config::kBlockM;
            tile_row += Config::kBlockM;
        }
    }
}

/// Claims each step's half of dQ, or waits until who did has stored it, and tells the consumers.
/// One warp. A claim is made when the step before is over, and CTAs come to query blocks in the
/// same order: who waits at one, with its partner, holds none before it, so that the lowest one
/// goes on.
template <class Config>
__device__ __forceinline__ void claim_dq(const BwdClusterAddresses<Config>& shared,
                                         BwdClusterStorage<Config>& storage, const BwdArgs& args,
                                         int rank) {
    const BwdTile& tile = storage.tile;
    const bool leader = threadIdx.x % 32 == 0;
    const int64_t tiles = int64_t{tile.tiles_per_head} * args.params.problem.num_heads_q;
    uint32_t count = 0;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        int* parts = args.workspace.dq_turn + rank * tiles + int64_t{head} * tile.tiles_per_head +
                     tile.first_tile + tile.begin;
#pragma unroll 1
        for (int block = tile.begin; block < tile.end; ++block, ++parts, ++count) {
            if (count != 0) {
                const uint32_t last = count - 1;
                wait_barrier(shared.q_free(static_cast<int>(last % Config::kStages)),
                             last / Config::kStages % 2);
            }
            int is_first = 0;
            if (leader) {
                const int state = ptx::atom_acquire_cas(parts, kNoDq, kDqClaimed);
                if (state == kDqClaimed) wait_flag(parts, kDqStored);
                is_first = state == kNoDq;
                storage.dq_is_first[count % 2] = is_first;
                ptx::mbarrier_arrive(shared.dq_go(count % 2));
            }
            if (__shfl_sync(0xffffffffu, is_first, 0) != 0) {
                ptx::bar_sync(kDqReady, Config::kConsumers + 32);  // all have stored
                if (leader) ptx::red_release_add(parts, 1);
            }
        }
    }
}

/// One thread's view of the consumers' work.
template <class Config>
struct BwdClusterConsumer {
    static constexpr int kBlockM = Config::kBlockM;
    static constexpr int kBlockN = Config::kBlockN;
    static constexpr int kColumns = Config::kKeyColumns;
    using Element = typename Config::Element;
    using QLayout = typename Config::QLayout;
    using DoutLayout = typename Config::DoutLayout;
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    using SLayout = typename Config::SLayout;
    using Chunk = typename Config::ChunkLayout;
    static constexpr ptx::WgmmaType kType = wgmma_type<Element>();
    using ScoresMma = ptx::Wgmma<kType, kColumns>;
    using SliceMma = ptx::Wgmma<kType, kBlockN>;
    using DqMma = ptx::Wgmma<kType, Config::kDqColumns>;
    static constexpr ptx::Major kInner = ptx::Major::kContraction;
    static constexpr ptx::Major kOuter = ptx::Major::kOuter;

    BwdClusterAddresses<Config> shared;
    int warpgroup;  // of the consumers
    int thread;     // inside the warpgroup
    // dK^T and dV^T: rows are head dims
    float dk[Config::kSlices][kBlockN / 2], dv[Config::kSlicesV][kBlockN / 2];

    __device__ __forceinline__ explicit BwdClusterConsumer(
        const BwdClusterAddresses<Config>& addresses)
        : shared(addresses) {
        warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) - 1;
        thread = static_cast<int>(threadIdx.x) - 128 * (warpgroup + 1);
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
#pragma unroll
            for (int slice = 0; slice < Config::kSlices; ++slice) dk[slice][i] = 0.0f;
#pragma unroll
            for (int slice = 0; slice < Config::kSlicesV; ++slice) dv[slice][i] = 0.0f;
        }
    }

    __device__ __forceinline__ int lane() const { return thread % 32; }
    __device__ __forceinline__ int warp() const { return thread / 32; }
    __device__ __forceinline__ void meet() const {
        ptx::bar_sync(kConsumersMeet, Config::kConsumers);
    }

    /// S or dP of this warpgroup's keys: `keys` is the tile of K or V, `queries` that of Q or dO.
    template <class QueryLayout, class KeyLayout>
    __device__ __forceinline__ void scores_mma(float* acc, uint32_t queries, uint32_t keys) const {
        const uint64_t a = QueryLayout::column_descriptor(queries);
        const uint64_t b = KeyLayout::column_descriptor(
            keys + static_cast<uint32_t>(warpgroup * kColumns * KeyLayout::kRowBytes));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < QueryLayout::kColumns / 16; ++k) {
            ScoresMma::template ss<kInner, kInner>(
                acc, a + (QueryLayout::column_step_offset(k) >> 4),
                b + (KeyLayout::column_step_offset(k) >> 4), k != 0);
        }
        ptx::wgmma_commit_group();
    }

    /// A slice of dV^T += dO^T P or dK^T += Q^T dS: `queries` is its chunk of 64 columns.
    __device__ __forceinline__ void slice_mma(float* acc, uint32_t queries, uint32_t scores) const {
        const uint64_t a = Chunk::row_descriptor(queries);
        const uint64_t b = SLayout::row_descriptor(scores);
#pragma unroll
        for (int k = 0; k < kBlockM / 16; ++k) {
            SliceMma::template ss<kOuter, kOuter>(acc, a + (Chunk::row_step_offset(k) >> 4),
                                                  b + (SLayout::row_step_offset(k) >> 4), 1);
        }
    }

    /// dQ += dS K over the keys of one CTA: `keys` is a chunk of 64 columns of its K.
    __device__ __forceinline__ void dq_mma(float* acc, uint32_t scores, uint32_t keys,
                                           bool accumulate) const {
        const uint64_t a = SLayout::column_descriptor(scores);
        const uint64_t b = Chunk::row_descriptor(keys);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
            DqMma::template ss<kInner, kOuter>(acc, a + (SLayout::column_step_offset(k) >> 4),
                                               b + (Chunk::row_step_offset(k) >> 4),
                                               accumulate || k != 0);
        }
        ptx::wgmma_commit_group();
    }

    __device__ __forceinline__ int row(int r) const { return warp() * 16 + lane() / 4 + 8 * r; }

    /// Sets the scores of keys that their row does not see to -inf.
    __device__ __forceinline__ void mask_scores(float* st, const BwdTile& tile, int block) const {
        const int first_key = warpgroup * kColumns + 2 * (lane() % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = block * kBlockM + row(r);
            const int begin = i - tile.row_end + 1 - first_key;
            const int end = min(i - tile.row_begin + 1, tile.keys) - first_key;
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int key = 8 * j + e;
                    if (key < begin || key >= end) st[4 * j + 2 * r + e] = negative_infinity();
                }
            }
        }
    }

    /// S -> P in place.
    __device__ __forceinline__ void probabilities(float* st, int stage, float scale_log2) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float lse =
                ptx::ld_shared_f32(shared.lse_log2(stage) + static_cast<uint32_t>(row(r) * 4));
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    st[4 * j + e] = ptx::ex2_approx(fmaf(st[4 * j + e], scale_log2, -lse));
                }
            }
        }
    }

    /// P and dS = P (dP - delta), rounded.
    __device__ __forceinline__ void score_gradients(const float* st, const float* dp, uint32_t* p,
                                                    uint32_t* ds) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float delta =
                ptx::ld_shared_f32(shared.delta() + static_cast<uint32_t>(row(r) * 4));
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
                const float *s = st + 4 * j + 2 * r, *d = dp + 4 * j + 2 * r;
                p[2 * j + r] = Element::pack(s[0], s[1]);
                ds[2 * j + r] = Element::pack(s[0] * (d[0] - delta), s[1] * (d[1] - delta));
            }
        }
    }

    /// Both at once, with softcap and ALiBi: st holds S.
    __device__ __forceinline__ void general_gradients(const BwdScoreTerms& terms, const float* st,
                                                      const float* dp, uint32_t* p, uint32_t* ds,
                                                      int stage, int block) const {
        const int key = warpgroup * kColumns + 2 * (lane() % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t place = static_cast<uint32_t>(row(r) * 4);
            const float lse = ptx::ld_shared_f32(shared.lse_log2(stage) + place);
            const float delta = ptx::ld_shared_f32(shared.delta() + place);
            const int i = block * kBlockM + row(r);
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
                const int e = 4 * j + 2 * r;
                float p0, p1, ds0, ds1;
                terms.gradients(st[e], dp[e], i, key + 8 * j, lse, delta, p0, ds0);
                terms.gradients(st[e + 1], dp[e + 1], i, key + 8 * j + 1, lse, delta, p1, ds1);
                p[2 * j + r] = Element::pack(p0, p1);
                ds[2 * j + r] = Element::pack(ds0, ds1);
            }
        }
    }

    /// P or dS to its tile: queries x keys.
    __device__ __forceinline__ void store_scores(uint32_t tile, const uint32_t* scores) const {
        const int i = warp() * 16 + (lane() & 15);
#pragma unroll
        for (int k = 0; k < kColumns / 16; ++k) {
            const int unit = warpgroup * (kColumns / 8) + 2 * k + (lane() >> 4);
            ptx::stmatrix_x4(tile + static_cast<uint32_t>(SLayout::unit_offset(i, unit)),
                             scores[4 * k], scores[4 * k + 1], scores[4 * k + 2],
                             scores[4 * k + 3]);
        }
    }

    /// A slice, rounded, to a tile of keys x head dim. `slice` counts over both warpgroups.
    template <class Layout>
    __device__ __forceinline__ void store_slice(uint32_t tile, int slice, const float* acc,
                                                float scale) const {
        const int unit = slice * 8 + warp() * 2 + (lane() >> 3 & 1);
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
            const float* x = acc + 8 * k;
            const int key = k * 16 + (lane() & 7) + (lane() >> 4) * 8;
            ptx::stmatrix_x4_trans(tile + static_cast<uint32_t>(Layout::unit_offset(key, unit)),
                                   Element::pack(x[0] * scale, x[1] * scale),
                                   Element::pack(x[2] * scale, x[3] * scale),
                                   Element::pack(x[4] * scale, x[5] * scale),
                                   Element::pack(x[6] * scale, x[7] * scale));
        }
    }

    /// Writes a warpgroup's 64 x 64 sums to memory, in register order.
    __device__ __forceinline__ void store_sums(float* sums, const float* acc) const {
        sums += thread * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float* x = acc + 4 * i;
            *reinterpret_cast<float4*>(sums + i * 512) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    /// Adds a warpgroup's 64 x 64 sums to memory, in register order.
    __device__ __forceinline__ void add_sums(float* sums, const float* acc) const {
        sums += thread * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float* x = acc + 4 * i;
            ptx::red_add_v4_f32(sums + i * 512, x[0], x[1], x[2], x[3]);
        }
    }
};

/// Zeros what lies in the tiles past a packed sequence's keys.
template <class Config>
__device__ __forceinline__ void zero_foreign_keys(BwdClusterConsumer<Config>& consumer,
                                                  BwdClusterStorage<Config>& storage, int rank) {
    constexpr int kBlockN = Config::kBlockN, kThreads = Config::kConsumers;
    const int keys = max(storage.tile.keys, 0);
    const int partner_keys = max(storage.tile.keys + (rank == 0 ? -kBlockN : kBlockN), 0);
    const int thread = static_cast<int>(threadIdx.x) - 128;
    if (keys < kBlockN) {
        zero_rows<typename Config::KLayout, kThreads>(storage.k, keys, thread);
        zero_rows<typename Config::VLayout, kThreads>(storage.v, keys, thread);
    }
    if (partner_keys < kBlockN) {
        zero_rows<typename Config::PartnerKLayout, kThreads>(storage.partner_k, partner_keys,
                                                             thread);
    }
    ptx::fence_proxy_async_shared();
    consumer.meet();
}

/// All query blocks of all heads of this CTA.
template <class Config>
__device__ __forceinline__ void consume_query_tiles(BwdClusterConsumer<Config>& consumer,
                                                    BwdClusterStorage<Config>& storage,
                                                    const BwdArgs& args, int rank) {
    constexpr int kBlockM = Config::kBlockM;
    constexpr int kDqEntries = kBlockM * Config::kDqColumns;
    constexpr uint32_t kChunkBytes = Config::ChunkLayout::kBytes;
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    const BwdTile& tile = storage.tile;
    const float scale_log2 = args.params.problem.softmax_scale * kLog2E;
    const bool packed = args.params.problem.is_packed();
    const bool first_stores = args.first_stores_dq;
    const uint32_t partner = static_cast<uint32_t>(rank ^ 1);
    const int slice = consumer.warpgroup * Config::kSlices;
    const int slice_v = consumer.warpgroup * Config::kSlicesV;
    uint32_t count = 0;  // steps so far
    int head = tile.head_begin;
    float* dq_sums = nullptr;

    if (tile.has_queries()) wait_barrier(shared.kv_full(), 0);
    if (packed && tile.has_queries()) zero_foreign_keys(consumer, storage, rank);

    const auto step = [&](int block, auto masked) {
        const int s = static_cast<int>(count % Config::kStages);
        float st[Config::kKeyColumns / 2], dp[Config::kKeyColumns / 2];
        wait_barrier(shared.q_full(s), count / Config::kStages % 2);
        if constexpr (decltype(masked)::value) {
            const int rows = tile.seqlen_q - block * kBlockM;
            if (packed && rows < kBlockM) {
                const int thread = static_cast<int>(threadIdx.x) - 128;
                wait_barrier(shared.dout_full(), count % 2);
                zero_rows<typename Config::QLayout, Config::kConsumers>(storage.q[s], rows, thread);
                zero_rows<typename Config::DoutLayout, Config::kConsumers>(storage.dout, rows,
                                                                           thread);
                ptx::fence_proxy_async_shared();
                consumer.meet();
            }
        }
        // S = Q K^T, dP = dO V^T
        consumer.template scores_mma<typename Config::QLayout, typename Config::KLayout>(
            st, shared.q(s), shared.k());
        wait_barrier(shared.dout_full(), count % 2);
        consumer.template scores_mma<typename Config::DoutLayout, typename Config::VLayout>(
            dp, shared.dout(), shared.v());
        ptx::wgmma_wait_group<1>();
        if constexpr (decltype(masked)::value) consumer.mask_scores(st, tile, block);
        // P = exp2(S * scale_log2 - lse_log2), dS = P * (dP - delta)
        uint32_t p[Config::kKeyColumns / 4], ds[Config::kKeyColumns / 4];
        if constexpr (Config::kGeneral) {
            ptx::wgmma_wait_group<0>();
            consumer.general_gradients(BwdScoreTerms::make(args.params.problem, tile, head), st, dp,
                                       p, ds, s, block);
        } else {
            consumer.probabilities(st, s, scale_log2);
            ptx::wgmma_wait_group<0>();
            consumer.score_gradients(st, dp, p, ds);
        }
        // The partner has used the last dS: it was copied in full, and this CTA's may be sent.
        if (count != 0) wait_barrier(shared.ds_free(), (count - 1) % 2);
        consumer.meet();  // all are done with the last P and dS
        consumer.store_scores(shared.ds(), ds);
        consumer.store_scores(shared.p(), p);
        ptx::fence_proxy_async_shared();
        consumer.meet();  // P and dS are complete
        if (threadIdx.x == 128) {
            ptx::mbarrier_arrive_expect_tx(shared.ds_full(), Config::SLayout::kBytes);
            ptx::bulk_copy_to_cta(ptx::mapa(shared.partner_ds(), partner), shared.ds(),
                                  Config::SLayout::kBytes, ptx::mapa(shared.ds_full(), partner));
        }
        // dV^T += dO^T P
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kSlicesV; ++i) {
            consumer.slice_mma(consumer.dv[i], shared.dout() + (slice_v + i) * kChunkBytes,
                               shared.p());
        }
        ptx::wgmma_commit_group();
        // dQ = dS K over this CTA's keys, then over the partner's; dK^T += Q^T dS around it
        float dq[Config::kDqColumns / 2];
        const uint32_t chunk = static_cast<uint32_t>(consumer.warpgroup);
        consumer.dq_mma(dq, shared.ds(),
                        shared.k() + (static_cast<uint32_t>(2 * rank) + chunk) * kChunkBytes,
                        false);
        ptx::wgmma_fence();
        consumer.slice_mma(consumer.dk[0], shared.q(s) + slice * kChunkBytes, shared.ds());
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<2>();
        if (consumer.thread == 0) ptx::mbarrier_arrive(shared.dout_free());
        wait_barrier(shared.ds_full(), count % 2);
        consumer.dq_mma(dq, shared.partner_ds(), shared.partner_k() + chunk * kChunkBytes, true);
        ptx::wgmma_fence();
        consumer.slice_mma(consumer.dk[1], shared.q(s) + (slice + 1) * kChunkBytes, shared.ds());
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (consumer.thread == 0) {
            ptx::mbarrier_arrive_remote(ptx::mapa(shared.ds_free(), partner));
        }
        bool is_first = false;
        if (first_stores) {
            wait_barrier(shared.dq_go(count % 2), count / 2 % 2);
            is_first = storage.dq_is_first[count % 2] != 0;
        }
        if (is_first) {
            consumer.store_sums(dq_sums, dq);
            ptx::bar_arrive(kDqReady, Config::kConsumers + 32);
        } else {
            consumer.add_sums(dq_sums, dq);
        }
        dq_sums += kBlockM * Config::kHeadDim;
        ptx::wgmma_wait_group<0>();
        if (consumer.thread == 0) ptx::mbarrier_arrive(shared.q_free(s));
        ++count;
    };

    const int end = tile.end, full_begin = tile.full_begin, full_end = tile.full_end;
#pragma unroll 1
    for (; head < tile.head_end; ++head) {
        int block = tile.begin;
        dq_sums = args.workspace.dq_accum +
                  (int64_t{head} * tile.tiles_per_head + tile.first_tile + block) *
                      (kBlockM * Config::kHeadDim) +
                  (2 * rank + consumer.warpgroup) * kDqEntries;
#pragma unroll 1
        for (; block < full_begin; ++block) step(block, std::true_type{});
#pragma unroll 1
        for (; block < full_end; ++block) step(block, std::false_type{});
#pragma unroll 1
        for (; block < end; ++block) step(block, std::true_type{});
    }
}

/// Writes dK and dV of the CTA's keys, or adds them to those of the group's other CTAs.
template <class Config>
__device__ __forceinline__ void store_key_gradients(BwdClusterConsumer<Config>& consumer,
                                                    const BwdClusterStorage<Config>& storage,
                                                    const BwdArgs& args) {
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    constexpr int kBlockN = Config::kBlockN;
    const AttentionProblem& problem = args.params.problem;
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    const BwdTile& tile = storage.tile;
    const int slice = consumer.warpgroup * Config::kSlices;
    const int slice_v = consumer.warpgroup * Config::kSlicesV;
    if (args.head_splits > 1) {
        if (!tile.has_queries() || tile.keys <= 0) return;
        float* dk = args.workspace.dk_accum +
                    int64_t{tile.accum_tile} * (kBlockN * Config::kHeadDim) + slice * 64 * kBlockN;
        float* dv = args.workspace.dv_accum +
                    int64_t{tile.accum_tile} * (kBlockN * Config::kHeadDimV) +
                    slice_v * 64 * kBlockN;
#pragma unroll
        for (int i = 0; i < Config::kSlices; ++i) {
            consumer.add_sums(dk + i * 64 * kBlockN, consumer.dk[i]);
        }
#pragma unroll
        for (int i = 0; i < Config::kSlicesV; ++i) {
            consumer.add_sums(dv + i * 64 * kBlockN, consumer.dv[i]);
        }
        return;
    }
    consumer.meet();  // all are done with K and V
#pragma unroll
    for (int i = 0; i < Config::kSlices; ++i) {
        consumer.template store_slice<KLayout>(shared.k(), slice + i, consumer.dk[i],
                                               problem.softmax_scale);
    }
#pragma unroll
    for (int i = 0; i < Config::kSlicesV; ++i) {
        consumer.template store_slice<VLayout>(shared.v(), slice_v + i, consumer.dv[i], 1.0f);
    }
    ptx::fence_proxy_async_shared();
    consumer.meet();
    store_gradient_tile<KLayout, Config::kConsumers>(storage.k, &args.dk, args.params.dk,
                                                     problem.head_dim, tile, problem);
    store_gradient_tile<VLayout, Config::kConsumers>(storage.v, &args.dv, args.params.dv,
                                                     problem.head_dim_v, tile, problem);
    if (threadIdx.x == 128) {
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();  // the CTA's shared memory must last until then
    }
}

template <class Config>
__device__ __forceinline__ void init_barriers(const BwdClusterAddresses<Config>& shared) {
    ptx::mbarrier_init(shared.kv_full(), 1);
    for (int i = 0; i < Config::kStages; ++i) {
        ptx::mbarrier_init(shared.q_full(i), 1);
        ptx::mbarrier_init(shared.q_free(i), Config::kWarpgroups);
    }
    ptx::mbarrier_init(shared.dout_full(), 1);
    ptx::mbarrier_init(shared.dout_free(), Config::kWarpgroups);
    ptx::mbarrier_init(shared.ds_full(), 1);
    for (uint32_t i = 0; i < 2; ++i) ptx::mbarrier_init(shared.dq_go(i), 1);
    ptx::mbarrier_init(shared.ds_free(), Config::kWarpgroups);
    ptx::fence_mbarrier_init();
}

template <class Config>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Config::kThreads, 1)
    bwd_cluster_kernel(const __grid_constant__ BwdArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& storage = *reinterpret_cast<BwdClusterStorage<Config>*>(shared_bytes);
    const BwdClusterAddresses<Config> shared{ptx::shared_address(shared_bytes)};
    const int rank = static_cast<int>(ptx::cluster_cta_rank());
    if (threadIdx.x == 0) {
        if (shared.base % 1024 != 0) __trap();
        init_barriers(shared);
        ptx::prefetch_tensormap(&args.q);
        ptx::prefetch_tensormap(&args.k);
        ptx::prefetch_tensormap(&args.v);
        ptx::prefetch_tensormap(&args.dout);
        storage.tile.template find<Config::kTileKeys, Config::kBlockN, Config::kBlockM>(
            args, static_cast<int>(blockIdx.x) / 2, rank * Config::kBlockN);
        if (storage.tile.has_queries()) load_keys(shared, storage.tile, args, rank);
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();  // for LSE, delta and the zeros of dQ; before any return
    const BwdTile& tile = storage.tile;
    if (!tile.used()) return;  // the partner's tile is not either

    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<Config::kLoaderRegisters>();
        if (threadIdx.x == 0 && tile.has_queries()) load_queries(shared, tile, args);
        if (threadIdx.x / 32 == 1 && args.first_stores_dq) {
            claim_dq<Config>(shared, storage, args, rank);
        }
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        BwdClusterConsumer<Config> consumer(shared);
        // Not under a condition: a second way to the sums of 0 costs copies of all of them.
        consume_query_tiles(consumer, storage, args, rank);
        store_key_gradients(consumer, storage, args);
        __syncwarp();
    }
    // The partner may still signal or write here.
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

}  // namespace sm90
}  // namespace flash_attn_norm
