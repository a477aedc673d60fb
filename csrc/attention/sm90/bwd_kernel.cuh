#pragma once

#include <cstdint>

#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_config.h"
#include "attention/sm90/bwd_consumer.cuh"
#include "attention/sm90/bwd_producer.cuh"
#include "attention/sm90/bwd_score_terms.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// P and dS of a step, dS in shared memory as well, and dV += P^T dO of the first kMiddleDv steps
/// of 16 queries. `st` and `dp` are being computed.
template <class Config>
__device__ __forceinline__ void compute_score_gradients(BwdConsumer<Config>& consumer, float* st,
                                                        float* dp, float2* lse_log2, uint32_t* p,
                                                        uint32_t* ds, int stage, float scale_log2) {
    constexpr int kSteps = Config::kSteps, kAhead = Config::kRowsAhead;
    constexpr int kEarlyP = Config::kEarlyP, kEarlyDv = Config::kEarlyDv;
    constexpr int kMiddleDv = Config::kMiddleDv;
    const BwdAddresses<Config>& shared = consumer.shared;
    float2 delta[2 * kSteps];
    const auto load_delta = [&](int k) {
        if (k < kSteps) consumer.load_rows(delta, shared.delta(stage), k);
    };
    const auto probabilities = [&](int k) {
        if (k + kAhead < kSteps) consumer.load_rows(lse_log2, shared.lse_log2(stage), k + kAhead);
        consumer.probabilities(st, lse_log2, k, scale_log2);
    };
    const auto gradients = [&](int k) {
        if (k >= kEarlyDv) consumer.round_probabilities(st, p, k);
        load_delta(k + kAhead);
        consumer.score_gradients(st, dp, ds, delta, k);
    };
#pragma unroll
    for (int k = 0; k < kEarlyP; ++k) {
        probabilities(k);
        if (k < kEarlyDv) consumer.round_probabilities(st, p, k);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) load_delta(k);
    if constexpr (kEarlyDv > 0) {
        consumer.template key_gradient_mma<0, kEarlyDv>(consumer.dv, p, shared.dout(stage));
    }
    ptx::wgmma_wait_group<(kEarlyDv > 0 ? 1 : 0)>();
#pragma unroll
    for (int k = 0; k < kSteps && !Config::kStreamsScores; ++k) gradients(k);
    consumer.meet();  // all are done with the last step's dS
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        if (k >= kEarlyP) probabilities(k);
        if (Config::kStreamsScores) gradients(k);
        consumer.store_score_gradients(ds, k);
        if constexpr (kMiddleDv > kEarlyDv) {
            if (k + 1 == kMiddleDv) {
                consumer.template key_gradient_mma<kEarlyDv, kMiddleDv>(consumer.dv, p,
                                                                        shared.dout(stage));
            }
        }
    }
}

/// The same with softcap and ALiBi, without dV.
template <class Config>
__device__ __forceinline__ void compute_score_gradients(BwdConsumer<Config>& consumer,
                                                        const BwdScoreTerms& terms, const float* st,
                                                        const float* dp, uint32_t* p, uint32_t* ds,
                                                        int stage, int block) {
    ptx::wgmma_wait_group<0>();
    consumer.meet();  // all are done with the last step's dS
#pragma unroll
    for (int k = 0; k < Config::kSteps; ++k) {
        consumer.general_gradients(terms, st, dp, p, ds, k, stage, block);
        consumer.store_score_gradients(ds, k);
    }
}

/// One step: query block `block` of head `head`. `count`: steps of this CTA so far. `scale_log2`
/// stays in a register: a load of it would stand before the exponentials.
template <class Config, bool kMasked>
__device__ __forceinline__ void consume_query_tile(BwdConsumer<Config>& consumer,
                                                   BwdSharedStorage<Config>& storage,
                                                   const BwdArgs& args, int head, int block,
                                                   uint32_t& count, float scale_log2,
                                                   bool is_first) {
    constexpr int kBlockM = Config::kBlockM;
    const BwdAddresses<Config>& shared = consumer.shared;
    const BwdTile& tile = storage.tile;
    const int s = static_cast<int>(count % Config::kStages);
    const uint32_t parity = count / Config::kStages % 2;
    ptx::mbarrier_wait(shared.q_full(s), parity);
    if constexpr (kMasked) {
        const int rows = tile.seqlen_q - block * kBlockM;
        if (args.params.problem.is_packed() && rows < kBlockM) {
            ptx::mbarrier_wait(shared.dout_full(s), parity);
            zero_foreign_rows<typename Config::QLayout, Config::kConsumers>(storage.q[s],
                                                                            storage.dout[s], rows);
        }
    }
    // S^T = K Q^T, dP^T = V dO^T
    float st[kBlockM / 2], dp[kBlockM / 2];
    float2 lse_log2[2 * Config::kSteps];
    consumer.scores_mma(st, shared.k(), shared.q(s));
#pragma unroll
    for (int k = 0; k < Config::kRowsAhead && !Config::kGeneral; ++k) {
        consumer.load_rows(lse_log2, shared.lse_log2(s), k);
    }
    ptx::mbarrier_wait(shared.dout_full(s), parity);
    consumer.scores_mma(dp, shared.v(), shared.dout(s));
    if (Config::kAnnouncesLate && !is_first) consumer.announce_dq();
    ptx::wgmma_wait_group<1>();
    if constexpr (kMasked) consumer.mask_scores(st, tile, block);
    // P = exp2(S * scale_log2 - lse_log2), dS = P * (dP - delta), dV += P^T dO
    uint32_t p[kBlockM / 4], ds[kBlockM / 4];
    if constexpr (Config::kGeneral) {
        const auto terms = BwdScoreTerms::make(args.params.problem, tile, head);
        compute_score_gradients(consumer, terms, st, dp, p, ds, s, block);
    } else {
        compute_score_gradients(consumer, st, dp, lse_log2, p, ds, s, scale_log2);
    }
    constexpr int kDvSteps = Config::kGeneral ? 0 : Config::kMiddleDv;
    if constexpr (kDvSteps < Config::kSteps) {  // the rest
        consumer.template key_gradient_mma<kDvSteps>(consumer.dv, p, shared.dout(s));
    }
    // dK += dS^T Q, a part that runs while the warpgroups meet
    constexpr int kEarlyDk = Config::kEarlyDk;
    consumer.template key_gradient_mma<0, kEarlyDk>(consumer.dk, ds, shared.q(s));
    ptx::fence_proxy_async_shared();
    consumer.meet();  // dS is complete
    // dQ = dS K
    float dq[Config::kDqRegisters];
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
}

/// All query blocks of all heads of a tile.
template <class Config>
__device__ __forceinline__ void consume_query_tiles(BwdConsumer<Config>& consumer,
                                                    BwdSharedStorage<Config>& storage,
                                                    const BwdArgs& args, uint32_t& count) {
    const BwdTile& tile = storage.tile;
    if (args.params.problem.is_packed() && tile.keys < Config::kBlockN && tile.has_queries()) {
        zero_foreign_rows<typename Config::KLayout, Config::kConsumers>(storage.k, storage.v,
                                                                        tile.keys);
    }
    const float scale_log2 = args.params.problem.softmax_scale * kLog2E;
    const uint32_t first = count;
    const int end = tile.end, full_begin = tile.full_begin, full_end = tile.full_end;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        int block = tile.begin;
#pragma unroll 1
        for (; block < full_begin; ++block) {
            consume_query_tile<Config, true>(consumer, storage, args, head, block, count,
                                             scale_log2, count == first);
        }
#pragma unroll 1
        for (; block < full_end; ++block) {
            consume_query_tile<Config, false>(consumer, storage, args, head, block, count,
                                              scale_log2, count == first);
        }
#pragma unroll 1
        for (; block < end; ++block) {
            consume_query_tile<Config, true>(consumer, storage, args, head, block, count,
                                             scale_log2, count == first);
        }
    }
    if (Config::kAnnouncesLate && tile.has_queries()) consumer.announce_dq();
}

/// Writes dK and dV of the CTA's keys, or adds them to those of the group's other CTAs. `rows`:
/// room for both tiles.
template <class Config>
__device__ __forceinline__ void store_key_gradients(BwdConsumer<Config>& consumer,
                                                    unsigned char* rows, const BwdTile& tile,
                                                    const BwdArgs& args) {
    using KLayout = typename Config::KLayout;
    const AttentionProblem& problem = args.params.problem;
    if (args.head_splits > 1) {
        if (!tile.has_queries()) return;
        const int64_t first = int64_t{tile.accum_tile} * (Config::kBlockN * Config::kHeadDim);
        consumer.add_rows(args.workspace.dk_accum + first, consumer.dk);
        consumer.add_rows(args.workspace.dv_accum + first, consumer.dv);
        return;
    }
    const int thread = static_cast<int>(threadIdx.x) - 128;  // of the consumers
    unsigned char *const dk = rows, *const dv = rows + KLayout::kBytes;
    consumer.meet();  // all are done with what lies there
    consumer.store_rows(ptx::shared_address(dk), consumer.dk, problem.softmax_scale);
    consumer.store_rows(ptx::shared_address(dv), consumer.dv, 1.0f);
    ptx::fence_proxy_async_shared();
    consumer.meet();
    store_gradient_tile<KLayout, Config::kConsumers>(dk, &args.dk, args.params.dk, problem.head_dim,
                                                     tile, problem, thread);
    store_gradient_tile<KLayout, Config::kConsumers>(dv, &args.dv, args.params.dv,
                                                     problem.head_dim_v, tile, problem, thread);
    if (threadIdx.x == 128) {
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();  // the place is written again after this
    }
}

template <class Config>
__device__ __forceinline__ void init_barriers(const BwdAddresses<Config>& shared) {
    for (uint32_t i = 0; i < 2; ++i) {
        ptx::mbarrier_init(shared.tile_full(i), 1);
        ptx::mbarrier_init(shared.tile_free(i), 1);
    }
    ptx::mbarrier_init(shared.kv_full(), 1);
    ptx::mbarrier_init(shared.kv_free(), Config::kConsumers);
    for (int i = 0; i < Config::kStages; ++i) {
        ptx::mbarrier_init(shared.q_full(i), 1);
        ptx::mbarrier_init(shared.dout_full(i), 1);
        ptx::mbarrier_init(shared.q_free(i), Config::kWarpgroups);
        ptx::mbarrier_init(shared.dout_free(i), Config::kWarpgroups);
    }
    ptx::fence_mbarrier_init();
}

/// Calls work(tile) for tile after tile of this CTA, as produce_tiles() finds them. One warp.
template <class Config, class Work>
__device__ __forceinline__ void for_each_tile(const BwdAddresses<Config>& shared,
                                              const BwdSharedStorage<Config>& storage,
                                              Work&& work) {
#pragma unroll 1
    for (uint32_t t = 0;; ++t) {
        ptx::mbarrier_wait(shared.tile_full(t % 2), t / 2 % 2);
        const BwdTile& tile = storage.ahead[t % 2];
        if (!tile.used()) return;
        work(tile);
        __syncwarp();
        if (!Config::kPersists) return;
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.tile_free(t % 2));
    }
}

/// The work of the consumers.
template <class Config>
__device__ __forceinline__ void consume_tiles(const BwdAddresses<Config>& shared,
                                              BwdSharedStorage<Config>& storage,
                                              const BwdArgs& args) {
    uint32_t count = 0, parity = 0;
#pragma unroll 1
    for (;;) {
        ptx::mbarrier_wait(shared.kv_full(), parity);
        if (!storage.tile.used()) return;
        BwdConsumer<Config> consumer(shared);
        // Not under a condition: a second way to the sums of 0 costs copies of all of them.
        consume_query_tiles(consumer, storage, args, count);
        if (!Config::kPersists) {
            store_key_gradients(consumer, Config::kStagesInDs ? storage.ds : storage.k,
                                storage.tile, args);
            if (args.dq_units > 0) {
                finish_unit<Config>(storage.tile, args, consumer.warpgroup, storage.rounds_unit);
            }
            return;
        }
        consumer.find_place();
        parity = ptx::ld_shared_u32(shared.tiles_begun()) % 2;
        const BwdTile tile = storage.tile;
        ptx::mbarrier_arrive(shared.kv_free());  // the next tile's may come
        store_key_gradients(consumer, storage.ds, tile, args);
    }
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
        storage.tiles_begun = 0;
        ptx::prefetch_tensormap(&args.q);
        ptx::prefetch_tensormap(&args.k);
        ptx::prefetch_tensormap(&args.v);
        ptx::prefetch_tensormap(&args.dout);
    }
    __syncthreads();
    ptx::griddepcontrol_launch_dependents();

    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < 4) {
        ptx::setmaxnreg_dec<Config::kLoaderRegisters>();
        if (warp == 0) {
            if (threadIdx.x == 0) produce_tiles(shared, storage, args);
        } else if (warp == 1) {
            ptx::griddepcontrol_wait();  // for dq_turn
            for_each_tile(shared, storage, [&](const BwdTile& tile) {
                reduce_dq_of_tile(shared, tile, args, storage.rounds_unit);
            });
        } else if (warp == 2 && Config::kZeroesLater && args.units_ahead > 0) {
            ptx::griddepcontrol_wait();  // for units_done
            for_each_tile(shared, storage, [&](const BwdTile& tile) {
                zero_later_sums<Config::kBlockN, Config::kBlockM * Config::kHeadDim, 1>(tile, args,
                                                                                        0);
            });
        }
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        consume_tiles(shared, storage, args);
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
