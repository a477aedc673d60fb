#pragma once

#include <cstdint>

#include "attention/element.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_config.h"
#include "attention/sm90/bwd_consumer_thread.cuh"
#include "attention/sm90/bwd_producer.cuh"
#include "attention/sm90/bwd_score_terms.cuh"
#include "ptx/math.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/opaque.cuh"
#include "ptx/reduction.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// One thread's view of the consumers' work.
template <class Config>
struct BwdConsumer : BwdConsumerThread<Config> {
    using Thread = BwdConsumerThread<Config>;
    using Element = typename Thread::Element;
    using Thread::kInner, Thread::kOuter, Thread::kType;
    using Thread::lane, Thread::meet, Thread::thread, Thread::warp, Thread::warpgroup;
    static constexpr int kHeadDim = Config::kHeadDim;
    static constexpr int kBlockM = Config::kBlockM;
    static constexpr int kBlockN = Config::kBlockN;
    using QLayout = typename Config::QLayout;
    using KLayout = typename Config::KLayout;
    using SLayout = typename Config::SLayout;
    using ScoresMma = ptx::Wgmma<kType, kBlockM>;
    using KeyGradientMma = ptx::Wgmma<kType, kHeadDim>;
    using DqMma = ptx::Wgmma<kType, Config::kDqTransposed ? kBlockM : Config::kDqColumns>;

    BwdAddresses<Config> shared;
    float dk[kHeadDim / 2], dv[kHeadDim / 2];

    __device__ __forceinline__ explicit BwdConsumer(const BwdAddresses<Config>& addresses)
        : shared(addresses) {
        find_place();
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    }
    /// Finds out anew which thread this is, so that what only a part of the work needs of it takes
    /// no registers during the others.
    __device__ __forceinline__ void find_place() {
        int index = static_cast<int>(threadIdx.x);
        if (Config::kPersists) ptx::make_opaque(index);
        Thread::find_place(index);
    }

    /// First of the 16 keys whose scores this thread's warp has.
    __device__ __forceinline__ int warp_key() const { return warpgroup * 64 + warp() * 16; }

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
        const uint64_t ds =
            SLayout::column_descriptor(shared.ds() + static_cast<uint32_t>(warpgroup * kRowBytes));
        const uint64_t keys =
            KLayout::row_descriptor(shared.k() + static_cast<uint32_t>(warpgroup * kColumnBytes));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
            const uint64_t a = ds + (SLayout::column_step_offset(k) >> 4);
            const uint64_t b = keys + (KLayout::row_step_offset(k) >> 4);
            if constexpr (Config::kDqTransposed) {
                DqMma::template ss<kOuter, kInner>(acc, b, a, k != 0);
            } else {
                DqMma::template ss<kInner, kOuter>(acc, a, b, k != 0);
            }
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

    /// S^T -> P^T in place of the rows of step k, 16 queries.
    __device__ __forceinline__ void probabilities(float* st, const float2* lse_log2, int k,
                                                  float scale_log2) const {
#pragma unroll
        for (int j = 2 * k; j < 2 * k + 2; ++j) {
            const float2 l = lse_log2[j];
            float* s = st + 4 * j;
            s[0] = ptx::ex2_approx(fmaf(s[0], scale_log2, -l.x));
            s[1] = ptx::ex2_approx(fmaf(s[1], scale_log2, -l.y));
            s[2] = ptx::ex2_approx(fmaf(s[2], scale_log2, -l.x));
            s[3] = ptx::ex2_approx(fmaf(s[3], scale_log2, -l.y));
        }
    }
    /// P^T of step k, rounded.
    __device__ __forceinline__ void round_probabilities(const float* st, uint32_t* p, int k) const {
#pragma unroll
        for (int j = 2 * k; j < 2 * k + 2; ++j) {
            p[2 * j] = Element::pack(st[4 * j], st[4 * j + 1]);
            p[2 * j + 1] = Element::pack(st[4 * j + 2], st[4 * j + 3]);
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
        for (int i = 0; i < Config::kDqRegisters / 4; ++i) {
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

}  // namespace sm90
}  // namespace flash_attn_norm
