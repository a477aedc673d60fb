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
__device__ __forceinline__ void zero_foreign_keys(const BwdClusterConsumer<Config>& consumer,
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

template <class Config>
__device__ __forceinline__ bool has_foreign_queries(const BwdTile& tile,
                                                    const AttentionProblem& problem, int block) {
    return problem.is_packed() && tile.seqlen_q - block * Config::kBlockM < Config::kBlockM;
}

/// The same of query block `block`, which both warpgroups begin with it.
template <class Config>
__device__ __forceinline__ void zero_foreign_queries(const BwdClusterConsumer<Config>& consumer,
                                                     BwdClusterStorage<Config>& storage,
                                                     const AttentionProblem& problem, int block,
                                                     uint32_t count) {
    const int rows = storage.tile.seqlen_q - block * Config::kBlockM;
    if (!problem.is_packed() || rows >= Config::kBlockM) return;
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int s = static_cast<int>(count % Config::kStages);
    wait_barrier(consumer.shared.q_full(s), count / Config::kStages % 2);
    wait_barrier(consumer.shared.dout_full(), count % 2);
    zero_rows<typename Config::QLayout, Config::kConsumers>(storage.q[s], rows, thread);
    zero_rows<typename Config::DoutLayout, Config::kConsumers>(storage.dout, rows, thread);
    ptx::fence_proxy_async_shared();
    consumer.meet();
}

/// One step of the first warpgroup: P of query block `block` of head `head`, and dV. `count`: steps
/// so far.
template <class Config, bool kMasked>
__device__ __forceinline__ void add_value_gradient(const BwdClusterConsumer<Config>& consumer,
                                                   BwdClusterStorage<Config>& storage,
                                                   const BwdArgs& args, float scale_log2, int head,
                                                   int block, uint32_t count, uint32_t* p,
                                                   float* dv) {
    using DoutLayout = typename Config::DoutLayout;
    constexpr int kBlockM = Config::kBlockM;
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    const BwdTile& tile = storage.tile;
    const int s = static_cast<int>(count % Config::kStages);
    // The last step's dV is still being computed.
    bool dout_is_held = count != 0;
    if constexpr (kMasked) {
        if (has_foreign_queries<Config>(tile, args.params.problem, block)) {
            ptx::wgmma_wait_group<0>();
            if (dout_is_held) consumer.release(shared.dout_free());
            dout_is_held = false;
            zero_foreign_queries(consumer, storage, args.params.problem, block, count);
        }
    }
    // S^T = K Q^T
    float st[kBlockM / 2];
    float2 lse_log2[kBlockM / 8];
    wait_barrier(shared.q_full(s), count / Config::kStages % 2);
    consumer.template scores_mma<typename Config::KLayout, typename Config::QLayout>(st, shared.k(),
                                                                                     shared.q(s));
    consumer.load_rows(lse_log2, shared.lse_log2(s));
    ptx::wgmma_wait_group<1>();
    if (dout_is_held) consumer.release(shared.dout_free());
    ptx::wgmma_wait_group<0>();
    consumer.release(shared.q_free(s));
    if constexpr (kMasked) consumer.mask_scores(st, tile, block);
    // P = exp2(S * scale_log2 - lse_log2)
    float general_weights[kBlockM / 2];
    const float* weights = Config::kGeneral ? general_weights : st;
    if constexpr (Config::kGeneral) {
        consumer.general_probabilities(BwdScoreTerms::make(args.params.problem, tile, head), st,
                                       general_weights, lse_log2, block);
    } else {
        consumer.probabilities(st, lse_log2, scale_log2);
    }
    if (count != 0) ptx::bar_sync(kWeightsFree, Config::kConsumers);
    consumer.store_weights(weights);
    ptx::bar_arrive(kWeightsReady, Config::kConsumers);
    // dV += P^T dO
    consumer.round_probabilities(st, p);
    wait_barrier(shared.dout_full(), count % 2);
    consumer.template key_gradient_mma<DoutLayout, 0, kBlockM / 16>(dv, p, shared.dout());
}

/// Adds a step's dQ to the sums in memory, or stores it as the first part.
template <class Config>
__device__ __forceinline__ void write_dq(const BwdClusterConsumer<Config>& consumer,
                                         const BwdClusterStorage<Config>& storage,
                                         const BwdArgs& args, uint32_t count, float* sums,
                                         const float* dq) {
    constexpr int kColumns = Config::kHeadDim / 2;
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    const bool in_turns = args.params.deterministic;
    bool is_first = false;
    if (in_turns || args.first_stores_dq) {
        wait_barrier(shared.dq_go(count % 2), count / 2 % 2);
        is_first = storage.dq_is_first[count % 2] != 0;
    }
    if (is_first) {
        consumer.template store_sums<kColumns>(sums, dq);
    } else {
        const bool waits = args.dq_units > 0 || args.units_ahead > 0;
        if (waits && count == 0) wait_barrier(shared.dq_free(), 0);
        consumer.template add_sums<kColumns>(sums, dq);
    }
    if (in_turns || is_first) ptx::bar_arrive(kDqReady, kHandOverThreads);
}

/// dS to shared memory, and to the partner's.
template <class Config>
__device__ __forceinline__ void send_score_gradients(const BwdClusterConsumer<Config>& consumer,
                                                     uint32_t partner, uint32_t count,
                                                     const uint32_t* ds) {
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    const uint32_t parity = count % 2;
    // The partner has used what lay there: it was copied in full, and its place may be written.
    if (count >= 2) wait_barrier(shared.ds_free(parity), count / 2 % 2 ^ 1);
    consumer.store_score_gradients(ds, shared.ds(parity));
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(kScoresStored, 128);
    if (consumer.thread == 0) {
        ptx::mbarrier_arrive_expect_tx(shared.ds_full(parity), Config::SLayout::kBytes);
        ptx::bulk_copy_to_cta(ptx::mapa(shared.partner_ds(parity), partner), shared.ds(parity),
                              Config::SLayout::kBytes, ptx::mapa(shared.ds_full(parity), partner));
    }
}

/// One step of the second warpgroup: dS, dK and dQ, which is added at `dq_sums`.
template <class Config, bool kMasked>
__device__ __forceinline__ void add_key_gradient(const BwdClusterConsumer<Config>& consumer,
                                                 BwdClusterStorage<Config>& storage,
                                                 const BwdArgs& args, int rank, int block,
                                                 uint32_t count, float* dq_sums, float* dk) {
    using QLayout = typename Config::QLayout;
    constexpr int kBlockM = Config::kBlockM, kSteps = kBlockM / 16;
    const BwdClusterAddresses<Config>& shared = consumer.shared;
    const int s = static_cast<int>(count % Config::kStages);
    const uint32_t parity = count % 2, partner = static_cast<uint32_t>(rank ^ 1);
    if constexpr (kMasked) {
        zero_foreign_queries(consumer, storage, args.params.problem, block, count);
    }
    // dP^T = V dO^T, dS = P * (dP - delta)
    float dp[kBlockM / 2];
    float2 delta[kBlockM / 8];
    uint32_t ds[kBlockM / 4];
    wait_barrier(shared.dout_full(), count % 2);
    consumer.template scores_mma<typename Config::VLayout, typename Config::DoutLayout>(
        dp, shared.v(), shared.dout());
    consumer.load_rows(delta, shared.delta());
    ptx::wgmma_wait_group<0>();
    consumer.release(shared.dout_free());
    ptx::bar_sync(kWeightsReady, Config::kConsumers);
    consumer.score_gradients(dp, delta, ds);
    ptx::bar_arrive(kWeightsFree, Config::kConsumers);
    send_score_gradients(consumer, partner, count, ds);
    // dQ = dS K over this CTA's keys, then over the partner's; dK += dS^T Q around it
    float dq[kBlockM * Config::kHeadDim / 2 / 128];
    consumer.template dq_mma<typename Config::KLayout>(
        dq, shared.ds(parity),
        shared.k() + static_cast<uint32_t>(2 * rank) * Config::KLayout::kChunkBytes, false);
    wait_barrier(shared.q_full(s), count / Config::kStages % 2);
    consumer.template key_gradient_mma<QLayout, 0, Config::kEarlyDk>(dk, ds, shared.q(s));
    wait_barrier(shared.ds_full(parity), count / 2 % 2);
    consumer.template dq_mma<typename Config::PartnerKLayout>(dq, shared.partner_ds(parity),
                                                              shared.partner_k(), true);
    consumer.template key_gradient_mma<QLayout, Config::kEarlyDk, kSteps>(dk, ds, shared.q(s));
    ptx::wgmma_wait_group<1>();
    if (consumer.lane() == 0) {
        ptx::mbarrier_arrive_remote(ptx::mapa(shared.ds_free(parity), partner));
    }
    write_dq(consumer, storage, args, count, dq_sums, dq);
    ptx::wgmma_wait_group<0>();
    consumer.release(shared.q_free(s));
}

/// Calls step(masked, head, block) for all query blocks of all heads of a tile. It must be inlined,
/// which clang does not do by itself: products of a called function are serialized.
template <class Step>
__device__ __forceinline__ void for_each_query_tile(const BwdTile& tile, Step&& step) {
    const int end = tile.end, full_begin = tile.full_begin, full_end = tile.full_end;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        int block = tile.begin;
#pragma unroll 1
        for (; block < full_begin; ++block) step(std::true_type{}, head, block);
#pragma unroll 1
        for (; block < full_end; ++block) step(std::false_type{}, head, block);
#pragma unroll 1
        for (; block < end; ++block) step(std::true_type{}, head, block);
    }
}

/// Writes a gradient of the CTA's keys, by way of the tile of Layout at `rows`, or adds it to those
/// of the group's other CTAs at `sums`. One warpgroup; all consumers meet in between.
template <class Layout, class Config>
__device__ __forceinline__ void store_key_gradient(const BwdClusterConsumer<Config>& consumer,
                                                   const BwdTile& tile, const BwdArgs& args,
                                                   unsigned char* rows, const CUtensorMap* map,
                                                   void* gradient, int head_dim, float* sums,
                                                   const float* acc, float scale) {
    if (args.head_splits > 1) {
        if (!tile.has_queries() || tile.keys <= 0) return;
        consumer.template add_sums<Layout::kColumns>(
            sums + int64_t{tile.accum_tile} * (Config::kBlockN * Layout::kColumns), acc);
        return;
    }
    consumer.meet();  // all are done with K and V
    consumer.template store_rows<Layout>(ptx::shared_address(rows), acc, scale);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(kRowsStored + consumer.warpgroup, 128);
    store_gradient_tile<Layout, 128>(rows, map, gradient, head_dim, tile, args.params.problem,
                                     consumer.thread);
    if (consumer.thread == 0) {
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();  // the CTA's shared memory must last until then
    }
}

/// All of the work of the warpgroup that computes probabilities.
template <class Config>
__device__ __forceinline__ void consume_for_values(const BwdClusterConsumer<Config>& consumer,
                                                   BwdClusterStorage<Config>& storage,
                                                   const BwdArgs& args) {
    constexpr int kRegisters = Config::kBlockN * Config::kHeadDimV / 128;
    const float scale_log2 = args.params.problem.softmax_scale * kLog2E;
    float dv[kRegisters];
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) dv[i] = 0.0f;
    uint32_t count = 0;
    uint32_t p[Config::kBlockM / 4];
    for_each_query_tile(storage.tile,
                        [&](auto masked, int head, int block) __attribute__((always_inline)) {
                            add_value_gradient<Config, decltype(masked)::value>(
                                consumer, storage, args, scale_log2, head, block, count, p, dv);
                            ++count;
                        });
    ptx::wgmma_wait_group<0>();
    if (args.dq_units > 0) ptx::bar_arrive(kTileAdded, Config::kConsumers + 32);
    store_key_gradient<typename Config::VLayout>(consumer, storage.tile, args, storage.v, &args.dv,
                                                 args.params.dv, args.params.problem.head_dim_v,
                                                 args.workspace.dv_accum, dv, 1.0f);
}

/// All of the work of the warpgroup that computes gradients of scores.
template <class Config>
__device__ __forceinline__ void consume_for_keys(const BwdClusterConsumer<Config>& consumer,
                                                 BwdClusterStorage<Config>& storage,
                                                 const BwdArgs& args, int rank) {
    constexpr int kRegisters = Config::kBlockN * Config::kHeadDim / 128;
    constexpr int kTileEntries = Config::kBlockM * Config::kHeadDim;
    const BwdTile& tile = storage.tile;
    const AttentionProblem& problem = args.params.problem;
    float dk[kRegisters];
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) dk[i] = 0.0f;
    float* const first_sums = args.workspace.dq_accum + first_dq_tile(tile, args) * kTileEntries +
                              2 * rank * Config::kDqEntries;
    const int tiles_per_head = dq_tiles_per_head(tile, args), head_begin = tile.head_begin;
    uint32_t count = 0;
    for_each_query_tile(tile, [&](auto masked, int head, int block) __attribute__((always_inline)) {
        float* dq_sums =
            first_sums + (int64_t{head - head_begin} * tiles_per_head + block) * kTileEntries;
        add_key_gradient<Config, decltype(masked)::value>(consumer, storage, args, rank, block,
                                                          count, dq_sums, dk);
        ++count;
    });
    if (args.dq_units > 0) ptx::bar_arrive(kTileAdded, Config::kConsumers + 32);
    store_key_gradient<typename Config::KLayout>(
        consumer, tile, args, storage.k, &args.dk, args.params.dk, problem.head_dim,
        args.workspace.dk_accum, dk, problem.softmax_scale);
}

template <class Config>
__device__ __forceinline__ void init_barriers(const BwdClusterAddresses<Config>& shared) {
    constexpr int kWarps = Config::kConsumers / 32;  // each arrives
    ptx::mbarrier_init(shared.kv_full(), 1);
    for (int i = 0; i < Config::kStages; ++i) {
        ptx::mbarrier_init(shared.q_full(i), 1);
        ptx::mbarrier_init(shared.q_free(i), kWarps);
    }
    ptx::mbarrier_init(shared.dout_full(), 1);
    ptx::mbarrier_init(shared.dout_free(), kWarps);
    for (uint32_t i = 0; i < 2; ++i) {
        ptx::mbarrier_init(shared.ds_full(i), 1);
        ptx::mbarrier_init(shared.ds_free(i), 4);
        ptx::mbarrier_init(shared.dq_go(i), 1);
    }
    ptx::mbarrier_init(shared.dq_free(), 1);
    ptx::fence_mbarrier_init();
}

/// The index of this cluster's tile. Deterministic sums wait for tiles of lower index, so those
/// are drawn by clusters that run. All threads of the cluster.
template <class Config>
__device__ __forceinline__ int find_index(BwdClusterStorage<Config>& storage, const BwdArgs& args,
                                          int rank) {
    if (!args.params.deterministic) return static_cast<int>(blockIdx.x) / 2;
    if (rank == 0 && threadIdx.x == 0) storage.index = atomicAdd(args.workspace.counters, 1);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    return static_cast<int>(ptx::ld_cluster_u32(ptx::mapa(ptx::shared_address(&storage.index), 0)));
}

template <class Config>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Config::kThreads, 1)
    bwd_cluster_kernel(const __grid_constant__ BwdArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& storage = *reinterpret_cast<BwdClusterStorage<Config>*>(shared_bytes);
    const BwdClusterAddresses<Config> shared{ptx::shared_address(shared_bytes)};
    const int rank = static_cast<int>(ptx::cluster_cta_rank());
    const int index = find_index(storage, args, rank);
    if (threadIdx.x == 0) {
        if (shared.base % 1024 != 0) __trap();
        init_barriers(shared);
        ptx::prefetch_tensormap(&args.q);
        ptx::prefetch_tensormap(&args.k);
        ptx::prefetch_tensormap(&args.v);
        ptx::prefetch_tensormap(&args.dout);
        storage.tile.template find<Config::kTileKeys, Config::kBlockN, Config::kBlockM>(
            args, index, rank * Config::kBlockN);
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
        if (threadIdx.x / 32 == 1 && (args.first_stores_dq || args.params.deterministic)) {
            order_dq<Config>(shared, storage, args, rank);
        }
        if (threadIdx.x / 32 == 2 && args.dq_units > 0) {
            count_tile<Config>(shared, storage, args, rank);
        }
        if (threadIdx.x / 32 == 2 && args.units_ahead > 0) {
            zero_later_sums<Config::kTileKeys, Config::kBlockM * Config::kHeadDim, 2>(tile, args,
                                                                                      rank);
            if (threadIdx.x % 32 == 0) {
                wait_for_zeros</*kShares=*/2>(tile, args);
                ptx::mbarrier_arrive(shared.dq_free());
            }
        }
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        const BwdClusterConsumer<Config> consumer(shared);
        if (tile.has_queries()) {
            wait_barrier(shared.kv_full(), 0);
            if (args.params.problem.is_packed()) zero_foreign_keys(consumer, storage, rank);
        }
        if (consumer.warpgroup == kComputesProbabilities) {
            consume_for_values(consumer, storage, args);
        } else {
            consume_for_keys(consumer, storage, args, rank);
        }
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
