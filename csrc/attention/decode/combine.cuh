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
constexpr int kCombineColumns = 128;  // of a CTA: four a lane

/// The sum over all splits of a row, and 2^(its LSE - the largest one) of splits lane, lane + 32,
/// ...; `lse` is that of the first one.
__device__ __forceinline__ RowTotal total_of_splits(const float* lse, int64_t stride,
                                                    int num_splits,
                                                    float (&weights)[kMaxSplits / 32]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    RowTotal total;
    total.max = negative_infinity();
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) {
        const int split = lane + 32 * i;
        weights[i] = split < num_splits ? lse[split * stride] : negative_infinity();
        total.max = fmaxf(total.max, weights[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        total.max = fmaxf(total.max, __shfl_xor_sync(0xffffffffu, total.max, offset));
    }
    const float base = total.max == negative_infinity() ? 0.0f : total.max;
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) {
        weights[i] = ptx::ex2_approx(weights[i] - base);
        total.sum += weights[i];
    }
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

/// out = sum over splits of 2^(lse - total) * partial out. kCombineColumns columns of a row (query
/// row and head) belong to `kWarpsPerRow` warps of a CTA, which share its splits: many for few
/// rows, to be done sooner.
template <class Arch, class Element, int kWarpsPerRow>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ SplitParams params) {
    __shared__ float4 shared[kWarpsPerRow > 1 ? kCombineThreads : 1];
    if constexpr (Arch::kHasGridDependency) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, part = warp % kWarpsPerRow;
    const uint32_t place = blockIdx.x * (kCombineWarps / kWarpsPerRow) + warp / kWarpsPerRow;
    if (place >= params.total_rows) return;  // with one warp per row only
    float weights[kMaxSplits / 32];
    const RowTotal total =
        total_of_splits(params.partial_lse + place, params.total_rows, params.num_splits, weights);

    const int columns = params.head_units_v * 2;  // units of four
    const int column = static_cast<int>(blockIdx.y) * 32 + lane;
    const float4* source =
        reinterpret_cast<const float4*>(params.partial_out) + int64_t{place} * columns + column;
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) {
        if (32 * i >= params.num_splits) break;
#pragma unroll 4
        for (int j = part; j < 32; j += kWarpsPerRow) {
            const float weight = __shfl_sync(0xffffffffu, weights[i], j);
            // Splits without a key have written no output.
            const bool is_written = weight > 0.0f && column < columns;
            const float4 value = is_written ? source[(32 * i + j) * params.total_rows * columns]
                                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            add(sum, weight, value);
        }
    }
    if constexpr (kWarpsPerRow > 1) {
        shared[part * 32 + lane] = sum;
        __syncthreads();
        if (part > 0) return;
#pragma unroll
        for (int other = 1; other < kWarpsPerRow; ++other) {
            add(sum, 1.0f, shared[other * 32 + lane]);
        }
    }

    const uint32_t row = place / static_cast<uint32_t>(params.num_heads_q);
    const int head = static_cast<int>(place % static_cast<uint32_t>(params.num_heads_q));
    const bool covered = !params.is_packed() || row < params.cu_seqlens_q[params.batch_size];
    float normalizer;
    const float row_lse = total.finish(sink_of(params, covered, head), normalizer);
    if (lane == 0 && blockIdx.y == 0) {
        const uint32_t batch =
            params.is_packed() ? 0 : row / static_cast<uint32_t>(params.seqlen_q);
        params.softmax_lse[lse_index(params, row, batch, head)] = row_lse;
    }
    if (column < columns) {
        static_cast<uint2*>(params.out)[int64_t{place} * columns + column] =
            make_uint2(Element::pack(sum.x * normalizer, sum.y * normalizer),
                       Element::pack(sum.z * normalizer, sum.w * normalizer));
    }
}

template <class Arch, class Element>
void launch_combine_of(const SplitParams& params, cudaStream_t stream) {
    // Below this many rows one warp for each would leave most of a card idle.
    constexpr int64_t kFewRows = 512;
    const int columns = params.head_units_v * 8;
    const auto launch = [&](auto kernel, int rows_per_cta) {
        const int64_t ctas = (params.total_rows + rows_per_cta - 1) / rows_per_cta;
        const dim3 grid(grid_size("the combination of splits", ctas),
                        static_cast<unsigned>((columns + kCombineColumns - 1) / kCombineColumns));
        launch_kernel<Arch>(kernel, grid, kCombineThreads, 0, params, "the combination of splits",
                            stream);
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
