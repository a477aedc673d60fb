#pragma once

#include <cstdint>

#include "attention/decode/launch.h"
#include "attention/decode/row_total.cuh"
#include "common/launch.h"
#include "ptx/grid_dependency.cuh"

namespace flash_attn_norm {
namespace decode {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = 32 * kCombineWarps;
constexpr int kMaxUnits = 4;  // of four value columns a lane: 512 columns

/// The sum over all splits of a row: `lse` is that of the first one.
__device__ __forceinline__ RowTotal total_of_splits(const float* lse, int64_t stride,
                                                    int num_splits) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float own[kMaxSplits / 32];
    RowTotal total;
    total.max = negative_infinity();
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) {
        const int split = lane + 32 * i;
        own[i] = split < num_splits ? lse[split * stride] : negative_infinity();
        total.max = fmaxf(total.max, own[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        total.max = fmaxf(total.max, __shfl_xor_sync(0xffffffffu, total.max, offset));
    }
    if (total.max == negative_infinity()) return total;
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) total.sum += ptx::ex2_approx(own[i] - total.max);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        total.sum += __shfl_xor_sync(0xffffffffu, total.sum, offset);
    }
    return total;
}

__device__ __forceinline__ void add(float4& sum, float weight, const float4& value) {
    sum.x = fmaf(weight, value.x, sum.x);
    sum.y = fmaf(weight, value.y, sum.y);
    sum.z = fmaf(weight, value.z, sum.z);
    sum.w = fmaf(weight, value.w, sum.w);
}

/// out = sum over splits of 2^(lse - total) * partial out. A row (query row and head) belongs to
/// `kWarpsPerRow` warps of a CTA, which share its splits: many for few rows, to be done sooner.
template <class Arch, class Element, int kWarpsPerRow>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ SplitParams params) {
    __shared__ float4 shared[kWarpsPerRow > 1 ? kCombineThreads * kMaxUnits : 1];
    if constexpr (Arch::kHasGridDependency) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, part = warp % kWarpsPerRow;
    const uint32_t place = blockIdx.x * (kCombineWarps / kWarpsPerRow) + warp / kWarpsPerRow;
    if (place >= params.total_rows) return;  // with one warp per row only
    const float* lse = params.partial_lse + place;
    const RowTotal total = total_of_splits(lse, params.total_rows, params.num_splits);

    const int columns = params.head_units_v * 2;  // units of four
    float4 sum[kMaxUnits] = {};
    const float4* partial = reinterpret_cast<const float4*>(params.partial_out);
#pragma unroll 2
    for (int split = part; split < params.num_splits; split += kWarpsPerRow) {
        const float split_lse = lse[split * params.total_rows];
        if (split_lse == negative_infinity()) continue;  // it has written no output
        const float weight = ptx::ex2_approx(split_lse - total.max);
        const float4* source = partial + (split * params.total_rows + place) * columns + lane;
#pragma unroll
        for (int u = 0; u < kMaxUnits; ++u) {
            if (32 * u + lane < columns) add(sum[u], weight, source[32 * u]);
        }
    }
    if constexpr (kWarpsPerRow > 1) {
#pragma unroll
        for (int u = 0; u < kMaxUnits; ++u) shared[(u * kWarpsPerRow + part) * 32 + lane] = sum[u];
        __syncthreads();
        if (part > 0) return;
#pragma unroll
        for (int u = 0; u < kMaxUnits; ++u) {
            if (32 * u >= columns) break;
#pragma unroll
            for (int other = 1; other < kWarpsPerRow; ++other) {
                add(sum[u], 1.0f, shared[(u * kWarpsPerRow + other) * 32 + lane]);
            }
        }
    }

    const uint32_t row = place / static_cast<uint32_t>(params.num_heads_q);
    const int head = static_cast<int>(place % static_cast<uint32_t>(params.num_heads_q));
    const bool covered = !params.is_packed() || row < params.cu_seqlens_q[params.batch_size];
    float normalizer;
    const float row_lse = total.finish(sink_of(params, covered, head), normalizer);
    if (lane == 0) {
        const uint32_t batch =
            params.is_packed() ? 0 : row / static_cast<uint32_t>(params.seqlen_q);
        params.softmax_lse[lse_index(params, row, batch, head)] = row_lse;
    }
    uint2* out = static_cast<uint2*>(params.out) + int64_t{place} * columns + lane;
#pragma unroll
    for (int u = 0; u < kMaxUnits; ++u) {
        if (32 * u + lane < columns) {
            out[32 * u] = make_uint2(Element::pack(sum[u].x * normalizer, sum[u].y * normalizer),
                                     Element::pack(sum[u].z * normalizer, sum[u].w * normalizer));
        }
    }
}

template <class Arch, class Element>
void launch_combine_of(const SplitParams& params, cudaStream_t stream) {
    // Below this many rows one warp for each would leave most of a card idle.
    constexpr int64_t kFewRows = 512;
    const auto launch = [&](auto kernel, int rows_per_cta) {
        const int64_t ctas = (params.total_rows + rows_per_cta - 1) / rows_per_cta;
        launch_kernel<Arch>(kernel, dim3(grid_size("the combination of splits", ctas)),
                            kCombineThreads, 0, params, "the combination of splits", stream);
    };
    if (params.total_rows < kFewRows) {
        launch(combine_kernel<Arch, Element, kCombineWarps>, 1);
    } else {
        launch(combine_kernel<Arch, Element, 1>, kCombineWarps);
    }
}

template <class Arch>
void launch_combine(const SplitParams& params, DType dtype, cudaStream_t stream) {
    if (dtype == DType::kBFloat16) {
        launch_combine_of<Arch, BFloat16>(params, stream);
    } else {
        launch_combine_of<Arch, Float16>(params, stream);
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
