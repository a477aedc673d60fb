#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_cluster_config.h"
#include "attention/sm90/bwd_cluster_consumer.cuh"
#include "attention/sm90/bwd_cluster_producer.cuh"
#include "attention/sm90/bwd_round_unit.cuh"
#include "attention/sm90/bwd_score_terms.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

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

/// What stays the same over the steps of a tile.
struct BwdClusterTile {
    int rank;
    uint32_t partner;
    float scale_log2;
    bool is_packed;
    bool first_stores;  // see BwdArgs
    bool rounds;        // the kernel rounds dQ
};

/// P and dS of a step, rounded.
template <class Config, bool kMasked>
__device__ __forceinline__ void compute_score_gradients(
    BwdClusterConsumer<Config>& consumer, BwdClusterStorage<Config>& storage, const BwdArgs& args,
    const BwdClusterTile& fixed, int head, int block, uint32_t count, uint32_t* p, uint32_t* ds) {
    using QLayout = typename Config::QLayout;
    using DoutLayout = typename Config::DoutLayout;
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    const BwdTile& tile = storage.tile;
    const int s = static_cast<int>(count % Config::kStages);
    float st[Config::kKeyColumns / 2], dp[Config::kKeyColumns / 2];
    wait_barrier(shared.q_full(s), count / Config::kStages % 2);
    if constexpr (kMasked) {
        const int rows = tile.seqlen_q - block * Config::kBlockM;
        if (fixed.is_packed && rows < Config::kBlockM) {
            const int thread = static_cast<int>(threadIdx.x) - 128;
            wait_barrier(shared.dout_full(), count % 2);
            zero_rows<QLayout, Config::kConsumers>(storage.q[s], rows, thread);
            zero_rows<DoutLayout, Config::kConsumers>(storage.dout, rows, thread);
            ptx::fence_proxy_async_shared();
            consumer.meet();
        }
    }
    // S = Q K^T, dP = dO V^T
    consumer.template scores_mma<QLayout, typename Config::KLayout>(st, shared.q(s), shared.k());
    wait_barrier(shared.dout_full(), count % 2);
    consumer.template scores_mma<DoutLayout, typename Config::VLayout>(dp, shared.dout(),
                                                                       shared.v());
    ptx::wgmma_wait_group<1>();
    if constexpr (kMasked) consumer.mask_scores(st, tile, block);
    // P = exp2(S * scale_log2 - lse_log2), dS = P * (dP - delta)
    if constexpr (Config::kGeneral) {
        ptx::wgmma_wait_group<0>();
        consumer.general_gradients(BwdScoreTerms::make(args.params.problem, tile, head), st, dp, p,
                                   ds, s, block);
    } else {
        consumer.probabilities(st, s, fixed.scale_log2);
        ptx::wgmma_wait_group<0>();
        consumer.score_gradients(st, dp, p, ds);
    }
}

/// P and dS to shared memory, and dS to the partner's.
template <class Config>
__device__ __forceinline__ void send_scores(BwdClusterConsumer<Config>& consumer, uint32_t partner,
                                            uint32_t count, const uint32_t* p, const uint32_t* ds) {
    const BwdClusterAddresses<Config>& shared = consumer.shared;
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
}

/// Adds a step's dQ to the sums in memory, or stores it as the first part.
template <class Config>
__device__ __forceinline__ void write_dq(BwdClusterConsumer<Config>& consumer,
                                         const BwdClusterStorage<Config>& storage,
                                         const BwdClusterTile& fixed, uint32_t count, float* sums,
                                         const float* dq) {
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    bool is_first = false;
    if (fixed.first_stores) {
        wait_barrier(shared.dq_go(count % 2), count / 2 % 2);
        is_first = storage.dq_is_first[count % 2] != 0;
    }
    if (is_first) {
        consumer.store_sums(sums, dq);
        ptx::bar_arrive(kDqReady, Config::kConsumers + 32);
    } else {
        if (fixed.rounds && count == 0) wait_barrier(shared.dq_free(), 0);
        consumer.add_sums(sums, dq);
    }
}

/// One step: query block `block` of head `head`, whose dQ is added at `dq_sums`. `count`: steps so
/// far.
template <class Config, bool kMasked>
__device__ __forceinline__ void consume_query_tile(BwdClusterConsumer<Config>& consumer,
                                                   BwdClusterStorage<Config>& storage,
                                                   const BwdArgs& args, const BwdClusterTile& fixed,
                                                   int head, int block, uint32_t& count,
                                                   float*& dq_sums) {
    constexpr uint32_t kChunkBytes = Config::ChunkLayout::kBytes;
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    const int s = static_cast<int>(count % Config::kStages);
    const int slice = consumer.warpgroup * Config::kSlices;
    const int slice_v = consumer.warpgroup * Config::kSlicesV;
    uint32_t p[Config::kKeyColumns / 4], ds[Config::kKeyColumns / 4];
    compute_score_gradients<Config, kMasked>(consumer, storage, args, fixed, head, block, count, p,
                                             ds);
    send_scores(consumer, fixed.partner, count, p, ds);
    // dV^T += dO^T P
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kSlicesV; ++i) {
        consumer.slice_mma(consumer.dv[i], shared.dout() + (slice_v + i) * kChunkBytes, shared.p());
    }
    ptx::wgmma_commit_group();
    // dQ = dS K over this CTA's keys, then over the partner's; dK^T += Q^T dS around it
    float dq[Config::kDqColumns / 2];
    const uint32_t chunk = static_cast<uint32_t>(consumer.warpgroup);
    consumer.dq_mma(dq, shared.ds(),
                    shared.k() + (static_cast<uint32_t>(2 * fixed.rank) + chunk) * kChunkBytes,
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
        ptx::mbarrier_arrive_remote(ptx::mapa(shared.ds_free(), fixed.partner));
    }
    write_dq(consumer, storage, fixed, count, dq_sums, dq);
    dq_sums += Config::kBlockM * Config::kHeadDim;
    ptx::wgmma_wait_group<0>();
    if (consumer.thread == 0) ptx::mbarrier_arrive(shared.q_free(s));
    ++count;
}

/// All query blocks of all heads of this CTA.
template <class Config>
__device__ __forceinline__ void consume_query_tiles(BwdClusterConsumer<Config>& consumer,
                                                    BwdClusterStorage<Config>& storage,
                                                    const BwdArgs& args, int rank) {
    constexpr int kTileEntries = Config::kBlockM * Config::kHeadDim;
    constexpr int kDqEntries = Config::kBlockM * Config::kDqColumns;
    const BwdTile& tile = storage.tile;
    const AttentionProblem& problem = args.params.problem;
    const BwdClusterTile fixed{rank,
                               static_cast<uint32_t>(rank ^ 1),
                               problem.softmax_scale * kLog2E,
                               problem.is_packed(),
                               args.first_stores_dq,
                               args.dq_units > 0};
    if (tile.has_queries()) wait_barrier(consumer.shared.kv_full(), 0);
    if (fixed.is_packed && tile.has_queries()) zero_foreign_keys(consumer, storage, rank);
    uint32_t count = 0;
    const int end = tile.end, full_begin = tile.full_begin, full_end = tile.full_end;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        int block = tile.begin;
        const int64_t first_tile = first_dq_tile(tile, args) +
                                   int64_t{head - tile.head_begin} * dq_tiles_per_head(tile, args);
        float* dq_sums = args.workspace.dq_accum + (first_tile + block) * kTileEntries +
                         (2 * rank + consumer.warpgroup) * kDqEntries;
        const auto step = [&](auto masked) {
            consume_query_tile<Config, decltype(masked)::value>(consumer, storage, args, fixed,
                                                                head, block, count, dq_sums);
        };
#pragma unroll 1
        for (; block < full_begin; ++block) step(std::true_type{});
#pragma unroll 1
        for (; block < full_end; ++block) step(std::false_type{});
#pragma unroll 1
        for (; block < end; ++block) step(std::true_type{});
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
    ptx::mbarrier_init(shared.dq_free(), 1);
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
        if (threadIdx.x / 32 == 2 && args.dq_units > 0) {
            count_tile<Config>(shared, storage, args, rank);
        }
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        BwdClusterConsumer<Config> consumer(shared);
        // Not under a condition: a second way to the sums of 0 costs copies of all of them.
        consume_query_tiles(consumer, storage, args, rank);
        if (args.dq_units > 0) ptx::bar_arrive(kTileAdded, Config::kConsumers + 32);
        store_key_gradients(consumer, storage, args);
        if (args.dq_units > 0) {
            finish_unit<Config>(tile, args, 2 * rank + consumer.warpgroup, storage.rounds_unit);
        }
        __syncwarp();
    }
    // The partner may still signal or write here.
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

}  // namespace sm90
}  // namespace flash_attn_norm
