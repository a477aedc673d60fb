#include "attention/decode/launch.h"
#include "attention/decode/row_total.cuh"
#include "attention/element.cuh"
#include "attention/sm80/launch.h"
#include "common/check.h"

namespace flash_attn_norm {
namespace decode {

namespace {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = 32 * kCombineWarps;
constexpr int kMaxUnits = 4;  // of four value columns a lane: 512 columns

/// The largest of the splits' LSEs of a row, and the sum of 2^(lse - largest).
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

/// out = sum over splits of 2^(lse - total) * partial out. A row (query row and head) belongs to
/// `kWarpsPerRow` warps of a CTA, which share its splits: many for few rows, to be done sooner.
template <class Element, int kWarpsPerRow>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ KvCacheAttentionParams params,
                   const __grid_constant__ SplitPlan plan) {
    __shared__ float4 shared[kWarpsPerRow > 1 ? kCombineThreads * kMaxUnits : 1];
    const AttentionProblem& problem = params.problem;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, part = warp % kWarpsPerRow;
    const int64_t flat = int64_t{blockIdx.x} * (kCombineWarps / kWarpsPerRow) + warp / kWarpsPerRow;
    if (flat >= plan.total_rows) return;  // with one warp per row only
    const float* lse = plan.partial_lse + flat;
    const RowTotal total = total_of_splits(lse, plan.total_rows, plan.num_splits);

    const int columns = problem.head_dim_v / 4;  // units of four
    float4 sum[kMaxUnits] = {};
    const float4* partial = reinterpret_cast<const float4*>(plan.partial_out);
#pragma unroll 2
    for (int split = part; split < plan.num_splits; split += kWarpsPerRow) {
        const float split_lse = lse[split * plan.total_rows];
        if (split_lse == negative_infinity()) continue;  // it has written no output
        const float weight = ptx::ex2_approx(split_lse - total.max);
        const float4* source = partial + (split * plan.total_rows + flat) * columns + lane;
#pragma unroll
        for (int u = 0; u < kMaxUnits; ++u) {
            if (32 * u + lane >= columns) break;
            const float4 value = source[32 * u];
            sum[u].x = fmaf(weight, value.x, sum[u].x);
            sum[u].y = fmaf(weight, value.y, sum[u].y);
            sum[u].z = fmaf(weight, value.z, sum[u].z);
            sum[u].w = fmaf(weight, value.w, sum[u].w);
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
                const float4 value = shared[(u * kWarpsPerRow + other) * 32 + lane];
                sum[u].x += value.x, sum[u].y += value.y;
                sum[u].z += value.z, sum[u].w += value.w;
            }
        }
    }

    const int64_t row = flat / problem.num_heads_q, head = flat % problem.num_heads_q;
    const bool covered = !problem.is_packed() || row < problem.cu_seqlens_q[problem.batch_size];
    const float sink = problem.s_aux == nullptr || !covered
                           ? negative_infinity()
                           : load_as_float(problem.s_aux, problem.s_aux_dtype, head);
    float normalizer;
    const float row_lse = total.finish(sink, normalizer);
    if (lane == 0) {
        const int64_t batch = problem.is_packed() ? 0 : row / problem.seqlen_q;
        params.softmax_lse[lse_index(problem, batch, row - batch * problem.seqlen_q, 0, head)] =
            row_lse;
    }
    uint2* out =
        reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + flat * problem.head_dim_v) +
        lane;
#pragma unroll
    for (int u = 0; u < kMaxUnits; ++u) {
        if (32 * u + lane >= columns) break;
        out[32 * u] = make_uint2(Element::pack(sum[u].x * normalizer, sum[u].y * normalizer),
                                 Element::pack(sum[u].z * normalizer, sum[u].w * normalizer));
    }
}

template <class Element>
void launch_combine_of(const KvCacheAttentionParams& params, const SplitPlan& plan,
                       cudaStream_t stream) {
    // Below this many rows one warp for each would leave most of a card idle.
    constexpr int64_t kFewRows = 512;
    if (plan.total_rows < kFewRows) {
        combine_kernel<Element, kCombineWarps>
            <<<sm80::grid_size(plan.total_rows), kCombineThreads, 0, stream>>>(params, plan);
    } else {
        const int64_t ctas = (plan.total_rows + kCombineWarps - 1) / kCombineWarps;
        combine_kernel<Element, 1>
            <<<sm80::grid_size(ctas), kCombineThreads, 0, stream>>>(params, plan);
    }
    check_launch("the combination of splits");
}

}  // namespace

void launch_combine(const KvCacheAttentionParams& params, const SplitPlan& plan,
                    cudaStream_t stream) {
    if (plan.num_splits == 1 || plan.total_rows == 0) return;
    if (params.problem.dtype == DType::kBFloat16) {
        launch_combine_of<BFloat16>(params, plan, stream);
    } else {
        launch_combine_of<Float16>(params, plan, stream);
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
