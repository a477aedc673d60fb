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

/// One thread's view of the consumers' work.
template <class Config>
struct BwdClusterConsumer : BwdConsumerThread<Config> {
    using Thread = BwdConsumerThread<Config>;
    using Element = typename Thread::Element;
    using Thread::kInner, Thread::kOuter, Thread::kType;
    using Thread::lane, Thread::meet, Thread::thread, Thread::warp, Thread::warpgroup;
    static constexpr int kBlockM = Config::kBlockM;
    static constexpr int kBlockN = Config::kBlockN;
    static constexpr int kColumns = Config::kKeyColumns;
    using QLayout = typename Config::QLayout;
    using DoutLayout = typename Config::DoutLayout;
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    using SLayout = typename Config::SLayout;
    using Chunk = typename Config::ChunkLayout;
    using ScoresMma = ptx::Wgmma<kType, kColumns>;
    using SliceMma = ptx::Wgmma<kType, kBlockN>;
    using DqMma = ptx::Wgmma<kType, Config::kDqColumns>;

    BwdClusterAddresses<Config> shared;
    // dK^T and dV^T: rows are head dims
    float dk[Config::kSlices][kBlockN / 2], dv[Config::kSlicesV][kBlockN / 2];

    __device__ __forceinline__ explicit BwdClusterConsumer(
        const BwdClusterAddresses<Config>& addresses)
        : shared(addresses) {
        Thread::find_place(static_cast<int>(threadIdx.x));
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
#pragma unroll
            for (int slice = 0; slice < Config::kSlices; ++slice) dk[slice][i] = 0.0f;
#pragma unroll
            for (int slice = 0; slice < Config::kSlicesV; ++slice) dv[slice][i] = 0.0f;
        }
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

}  // namespace sm90
}  // namespace flash_attn_norm
