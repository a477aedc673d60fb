#include <cuda_runtime.h>

#include "attention/bwd_passes.h"
#include "attention/element.cuh"
#include "attention/lse_log2.h"
#include "attention/online_softmax.cuh"
#include "common/check.h"
#include "common/launch.h"

namespace flash_attn_norm {

namespace {

constexpr int kThreads = 256;
constexpr int kThreadsPerRow = 8;
constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;

/// Bytes of `count` items, rounded up so that the next part stays aligned.
int64_t part_bytes(int64_t count, int64_t item_bytes) {
    return (count * item_bytes + 255) / 256 * 256;
}

int64_t bias_gradient_entries(const AttentionBwdParams& params) {
    const AttentionProblem& problem = params.problem;
    const BiasStrides& strides = params.dattn_bias_strides;
    const int64_t heads = strides.head != 0 ? problem.num_heads_q : 1;
    const int64_t batches = !problem.is_packed() && strides.batch != 0 ? problem.batch_size : 1;
    const int64_t all_rows = problem.is_packed() ? problem.total_q : problem.seqlen_q;
    return batches * heads * (strides.row != 0 ? all_rows : 1) * problem.bias_columns;
}

/// Sum of the products of 8 pairs of 16-bit elements.
template <class Element>
__device__ __forceinline__ float dot8(const uint4& a, const uint4& b) {
    const uint32_t* x = &a.x;
    const uint32_t* y = &b.x;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(Element::to_float(static_cast<uint16_t>(x[i])),
                   Element::to_float(static_cast<uint16_t>(y[i])), sum);
        sum = fmaf(Element::to_float(static_cast<uint16_t>(x[i] >> 16)),
                   Element::to_float(static_cast<uint16_t>(y[i] >> 16)), sum);
    }
    return sum;
}

/// One CTA prepares the block of query rows of one slot and head.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    preprocess_kernel(const __grid_constant__ AttentionBwdParams params,
                      const __grid_constant__ BwdWorkspace workspace, const int block_m,
                      const int64_t accum_entries) {
    __shared__ float warp_sums[kThreads / 32];
    const AttentionProblem& problem = params.problem;
    const BlockSlots slots = BlockSlots::queries(problem, block_m);
    const int64_t num_slots = slots.count();
    const int head = static_cast<int>(blockIdx.x / num_slots);
    const int64_t slot = blockIdx.x % num_slots;
    const int64_t batch = slots.batch_of(slot);
    const int64_t first_row = (slot - slots.first_slot(batch)) * block_m;
    const SeqlenInfo info = seqlen_info_or_uncovered(problem, batch, /*of_queries=*/true);
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t rows = first_row < 0 ? 0 : info.seqlen_q - first_row;

    float4* accum =
        reinterpret_cast<float4*>(workspace.dq_accum + int64_t{blockIdx.x} * accum_entries);
    if (rows > 0) {
        for (int64_t i = thread; i < accum_entries / 4; i += kThreads) {
            accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    const int units = problem.head_dim_v / 8;
    const int64_t out_row_stride = int64_t{problem.num_heads_q} * problem.head_dim_v;
    const int64_t lse_row = lse_offset(problem, info, head) + first_row;
    const float sink = params.ds_aux == nullptr
                           ? negative_infinity()
                           : load_as_float(problem.s_aux, problem.s_aux_dtype, head);
    float sink_sum = 0.0f;
    for (int row = thread / kThreadsPerRow; row < block_m; row += kRowsAtOnce) {
        const bool valid = row < rows;
        float delta = 0.0f;
        if (valid && params.dout != nullptr) {
            const int64_t out_row = info.batch * problem.seqlen_q + info.row_q + first_row + row;
            const uint4* out = reinterpret_cast<const uint4*>(
                static_cast<const uint16_t*>(params.out) + out_row * out_row_stride +
                int64_t{head} * problem.head_dim_v);
            const uint4* dout = reinterpret_cast<const uint4*>(
                static_cast<const uint16_t*>(params.dout) +
                tensor_offset(params.dout_strides, info.batch, info.row_q + first_row + row, head));
            for (int unit = thread % kThreadsPerRow; unit < units; unit += kThreadsPerRow) {
                delta += dot8<Element>(out[unit], dout[unit]);
            }
        }
#pragma unroll
        for (int offset = 1; offset < kThreadsPerRow; offset *= 2) {
            delta += __shfl_xor_sync(0xffffffffu, delta, offset);
        }
        if (thread % kThreadsPerRow == 0) {
            // Rows that do not exist or see no key get probability exp2(score - inf) = 0.
            float lse_log2 = -negative_infinity();
            if (valid) {
                const float lse = params.softmax_lse[lse_row + row];
                if (lse != negative_infinity()) {
                    lse_log2 = lse_log2_of(lse);
                    if (params.dsoftmax_lse != nullptr) {
                        delta -= params.dsoftmax_lse[lse_row + row];
                    }
                    sink_sum -= ptx::ex2_approx(sink * kLog2E - lse_log2) * delta;
                } else {
                    delta = 0.0f;  // whatever dsoftmax_lse holds there, 0 * inf must not arise
                }
            }
            workspace.lse_log2[int64_t{blockIdx.x} * block_m + row] = lse_log2;
            workspace.delta[int64_t{blockIdx.x} * block_m + row] = delta;
        }
    }
    if (params.ds_aux == nullptr) return;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        sink_sum += __shfl_xor_sync(0xffffffffu, sink_sum, offset);
    }
    if (thread % 32 == 0) warp_sums[thread / 32] = sink_sum;
    __syncthreads();
    if (thread == 0) {
        float sum = 0.0f;
        for (float part : warp_sums) sum += part;
        workspace.sink_parts[blockIdx.x] = sum;
    }
}

}  // namespace

BwdWorkspace BwdPlan::carve(const AttentionBwdParams& params) const {
    const AttentionProblem& problem = params.problem;
    const int64_t heads = problem.num_heads_q;
    const int64_t q_slots = BlockSlots::queries(problem, block_m).count();
    const int64_t k_slots = BlockSlots::keys(problem, block_n).count();
    const bool bias_columns_only =
        params.dattn_bias != nullptr && params.dattn_bias_strides.row == 0;
    const bool bias_in_turns = params.deterministic && params.dattn_bias != nullptr &&
                               !bias_columns_only && bias_gradient_is_shared(params);
    const int64_t key_blocks = (problem.bias_columns + block_n - 1) / block_n;
    const int64_t turn_heads = params.dattn_bias_strides.head == 0 ? 1 : heads;

    BwdWorkspace workspace;
    char* base = static_cast<char*>(params.workspace);
    int64_t used = 0;
    const auto take = [&](auto*& pointer, int64_t count) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + used);
        used += part_bytes(count, 4);
    };
    take(workspace.counters, 1);
    take(workspace.dq_turn, params.deterministic ? heads * q_slots : 0);
    take(workspace.bias_turn, bias_in_turns ? turn_heads * q_slots * key_blocks : 0);
    workspace.counter_bytes = params.deterministic ? used : 0;
    take(workspace.lse_log2, heads * q_slots * block_m);
    take(workspace.delta, heads * q_slots * block_m);
    take(workspace.sink_parts, params.ds_aux != nullptr ? heads * q_slots : 0);
    const int64_t keys =
        problem.is_packed() ? problem.total_k : problem.batch_size * problem.seqlen_k;
    take(workspace.bias_parts, bias_columns_only ? heads * keys : 0);
    take(workspace.dq_accum, heads * q_slots * dq.entries());
    const int64_t before_accum = used;
    const int64_t kv_tiles = head_splits > 1 ? problem.num_heads_kv * k_slots : 0;
    take(workspace.dk_accum, kv_tiles * dk.entries());
    take(workspace.dv_accum, kv_tiles * dv.entries());
    workspace.accum_bytes = used - before_accum;
    workspace.total_bytes = used;
    return workspace;
}

void bwd_preprocess(const AttentionBwdParams& params, const BwdPlan& plan, cudaStream_t stream) {
    const AttentionProblem& problem = params.problem;
    const BwdWorkspace workspace = plan.carve(params);
    if (workspace.counter_bytes > 0) {
        FAN_CUDA_CHECK(cudaMemsetAsync(workspace.counters, 0, workspace.counter_bytes, stream));
    }
    if (workspace.accum_bytes > 0) {
        FAN_CUDA_CHECK(cudaMemsetAsync(workspace.dk_accum, 0, workspace.accum_bytes, stream));
    }
    if (params.dattn_bias != nullptr) {
        // Keys and rows that no CTA visits have no gradient.
        const bool columns_only = params.dattn_bias_strides.row == 0;
        const int64_t keys =
            problem.is_packed() ? problem.total_k : problem.batch_size * problem.seqlen_k;
        const int64_t entries =
            columns_only ? problem.num_heads_q * keys : bias_gradient_entries(params);
        const int64_t bytes = columns_only || params.dattn_bias_dtype == DType::kFloat32 ? 4 : 2;
        FAN_CUDA_CHECK(cudaMemsetAsync(columns_only ? workspace.bias_parts : params.dattn_bias, 0,
                                       entries * bytes, stream));
    }
    const int64_t ctas = BlockSlots::queries(problem, plan.block_m).count() * problem.num_heads_q;
    if (ctas == 0) return;
    const auto kernel = problem.dtype == DType::kBFloat16 ? preprocess_kernel<BFloat16>
                                                          : preprocess_kernel<Float16>;
    kernel<<<grid_size("attention backward", ctas), kThreads, 0, stream>>>(
        params, workspace, plan.block_m, plan.dq.entries());
    check_launch("attention backward, preprocess");
}

}  // namespace flash_attn_norm
