#pragma once

#include <cstdint>
#include <type_traits>

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
