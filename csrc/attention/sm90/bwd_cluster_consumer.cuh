#pragma once

#include <cstdint>

#include "attention/element.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_cluster_config.h"
#include "attention/sm90/bwd_cluster_producer.cuh"
#include "attention/sm90/bwd_consumer_thread.cuh"
#include "attention/sm90/bwd_score_terms.cuh"
#include "ptx/math.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/reduction.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// One thread's view of the consumers' work. Scores and their gradients have keys as rows.
template <class Config>
struct BwdClusterConsumer : BwdConsumerThread<Config> {
    using Thread = BwdConsumerThread<Config>;
    using Element = typename Thread::Element;
    using Thread::kInner, Thread::kOuter, Thread::kType;
    using Thread::lane, Thread::meet, Thread::thread, Thread::warp, Thread::warpgroup;
    static constexpr int kBlockM = Config::kBlockM;
    static constexpr int kBlockN = Config::kBlockN;
    static constexpr int kSteps = kBlockM / 16;  // of 16 queries
    using QLayout = typename Config::QLayout;
    using DoutLayout = typename Config::DoutLayout;
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    using SLayout = typename Config::SLayout;
    using ScoresMma = ptx::Wgmma<kType, kBlockM>;
    using DqMma = ptx::Wgmma<kType, Config::kHeadDim / 2>;

    BwdClusterAddresses<Config> shared;

    __device__ __forceinline__ explicit BwdClusterConsumer(
        const BwdClusterAddresses<Config>& addresses)
        : shared(addresses) {
        Thread::find_place(static_cast<int>(threadIdx.x));
    }

    /// Says that this warp has read what `barrier` guards.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (lane() == 0) ptx::mbarrier_arrive(barrier);
    }

    /// S^T or dP^T: `keys` is the tile of K or V, `queries` that of Q or dO.
    template <class KeyLayout, class QueryLayout>
    __device__ __forceinline__ void scores_mma(float* acc, uint32_t keys, uint32_t queries) const {
        const uint64_t a = KeyLayout::column_descriptor(keys);
        const uint64_t b = QueryLayout::column_descriptor(queries);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < QueryLayout::kColumns / 16; ++k) {
            ScoresMma::template ss<kInner, kInner>(acc, a + (KeyLayout::column_step_offset(k) >> 4),
                                                   b + (QueryLayout::column_step_offset(k) >> 4),
                                                   k != 0);
        }
        ptx::wgmma_commit_group();
    }

    /// dV += P^T dO or dK += dS^T Q over the steps [kBegin, kEnd) of 16 queries, P^T or dS^T
    /// rounded in registers.
    template <class QueryLayout, int kBegin, int kEnd>
    __device__ __forceinline__ void key_gradient_mma(float* acc, const uint32_t* scores,
                                                     uint32_t queries) const {
        using Mma = ptx::Wgmma<kType, QueryLayout::kColumns>;
        const uint64_t b = QueryLayout::row_descriptor(queries);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = kBegin; k < kEnd; ++k) {
            Mma::template rs<kOuter>(acc, scores + 4 * k,
                                     b + (QueryLayout::row_step_offset(k) >> 4), 1);
        }
        ptx::wgmma_commit_group();
    }

    /// This CTA's columns of dQ += dS K over the keys of one CTA. `keys` is its first chunk of K.
    template <class Layout>
    __device__ __forceinline__ void dq_mma(float* acc, uint32_t scores, uint32_t keys,
                                           bool accumulate) const {
        const uint64_t a = SLayout::column_descriptor(scores);
        const uint64_t b = Layout::row_descriptor(keys);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
            DqMma::template ss<kInner, kOuter>(acc, a + (SLayout::column_step_offset(k) >> 4),
                                               b + (Layout::row_step_offset(k) >> 4),
                                               accumulate || k != 0);
        }
        ptx::wgmma_commit_group();
    }

    /// Sets the scores of rows that do not see their key to -inf.
    __device__ __forceinline__ void mask_scores(float* st, const BwdTile& tile, int block) const {
        const int first_row = block * kBlockM + 2 * (lane() % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = warp() * 16 + lane() / 4 + 8 * r;
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

    /// The LSE or delta, from `rows`, of this thread's queries.
    __device__ __forceinline__ void load_rows(float2* values, uint32_t rows) const {
        const uint32_t place = rows + static_cast<uint32_t>(lane() % 4 * 8);
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) values[j] = ptx::ld_shared_v2_f32(place + j * 32);
    }

    /// S^T -> P^T in place.
    __device__ __forceinline__ void probabilities(float* st, const float2* lse_log2,
                                                  float scale_log2) const {
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
            const float2 l = lse_log2[j];
            float* s = st + 4 * j;
            s[0] = ptx::ex2_approx(fmaf(s[0], scale_log2, -l.x));
            s[1] = ptx::ex2_approx(fmaf(s[1], scale_log2, -l.y));
            s[2] = ptx::ex2_approx(fmaf(s[2], scale_log2, -l.x));
            s[3] = ptx::ex2_approx(fmaf(s[3], scale_log2, -l.y));
        }
    }
    /// The same with softcap and ALiBi, and the weights in dS.
    __device__ __forceinline__ void general_probabilities(const BwdScoreTerms& terms, float* st,
                                                          float* weights, const float2* lse_log2,
                                                          int block) const {
        const int row = block * kBlockM + lane() % 4 * 2, key = warp() * 16 + lane() / 4;
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
            const float2 l = lse_log2[j];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int e = 4 * j + 2 * r;
                terms.probability(st[e], row + 8 * j, key + 8 * r, l.x, st[e], weights[e]);
                terms.probability(st[e + 1], row + 8 * j + 1, key + 8 * r, l.y, st[e + 1],
                                  weights[e + 1]);
            }
        }
    }
    __device__ __forceinline__ void round_probabilities(const float* st, uint32_t* p) const {
#pragma unroll
        for (int i = 0; i < kBlockM / 4; ++i) p[i] = Element::pack(st[2 * i], st[2 * i + 1]);
    }

    /// The weights of dP - delta, from one warpgroup to the other.
    __device__ __forceinline__ uint32_t weights_place() const {
        return shared.weights() + static_cast<uint32_t>(thread * 16);
    }
    __device__ __forceinline__ void store_weights(const float* weights) const {
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
            const float* w = weights + 4 * j;
            ptx::st_shared_v4_f32(weights_place() + j * 2048, w[0], w[1], w[2], w[3]);
        }
    }

    /// dS^T = weights (dP^T - delta), rounded.
    __device__ __forceinline__ void score_gradients(const float* dp, const float2* delta,
                                                    uint32_t* ds) const {
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
            const float4 w = ptx::ld_shared_v4_f32(weights_place() + j * 2048);
            const float2 d = delta[j];
            const float* dpj = dp + 4 * j;
            ds[2 * j] = Element::pack(w.x * (dpj[0] - d.x), w.y * (dpj[1] - d.y));
            ds[2 * j + 1] = Element::pack(w.z * (dpj[2] - d.x), w.w * (dpj[3] - d.y));
        }
    }
    /// To the tile of dS: queries x keys.
    __device__ __forceinline__ void store_score_gradients(const uint32_t* ds, uint32_t tile) const {
        const int key = warp() * 16 + (lane() >> 3 & 1) * 8;
        const int row = (lane() & 7) + (lane() >> 4) * 8;
        const uint32_t place = tile + static_cast<uint32_t>(SLayout::unit_offset(row, key / 8));
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            ptx::stmatrix_x4_trans(place + k * 16 * SLayout::kRowBytes, ds[4 * k], ds[4 * k + 1],
                                   ds[4 * k + 2], ds[4 * k + 3]);
        }
    }

    /// A gradient of Layout::kColumns columns, rounded, to a tile of keys x head dim.
    template <class Layout>
    __device__ __forceinline__ void store_rows(uint32_t tile, const float* acc, float scale) const {
        const int row = warp() * 16 + (lane() & 15);
#pragma unroll
        for (int k = 0; k < Layout::kColumns / 16; ++k) {
            const float* x = acc + 8 * k;
            ptx::stmatrix_x4(
                tile + static_cast<uint32_t>(Layout::unit_offset(row, 2 * k + (lane() >> 4))),
                Element::pack(x[0] * scale, x[1] * scale),
                Element::pack(x[2] * scale, x[3] * scale),
                Element::pack(x[4] * scale, x[5] * scale),
                Element::pack(x[6] * scale, x[7] * scale));
        }
    }

    /// Writes 64 rows of kColumns sums to memory, in register order.
    template <int kColumns>
    __device__ __forceinline__ void store_sums(float* sums, const float* acc) const {
        sums += thread * 4;
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
            const float* x = acc + 4 * i;
            *reinterpret_cast<float4*>(sums + i * 512) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    /// Adds them to those in memory.
    template <int kColumns>
    __device__ __forceinline__ void add_sums(float* sums, const float* acc) const {
        sums += thread * 4;
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
            const float* x = acc + 4 * i;
            ptx::red_add_v4_f32(sums + i * 512, x[0], x[1], x[2], x[3]);
        }
    }
};

}  // namespace sm90
}  // namespace flash_attn_norm
