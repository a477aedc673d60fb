#include <cuda_runtime.h>

#include "attention/delta_correction.h"
#include "attention/element.cuh"
#include "attention/online_softmax.cuh"
#include "attention/row_squares.cuh"
#include "attention/seqlens.h"
#include "attention/sink_gradient.h"
#include "attention/tile_scheduler.h"
#include "common/check.h"
#include "common/launch.h"
#include "ptx/math.cuh"

namespace flash_attn_norm {

namespace {

constexpr int kThreads = 256;
constexpr int kThreadsPerRow = 8;
constexpr int kKeys = 256;  // of a CTA

/// One CTA takes a block of keys of one sequence and K/V head.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    least_v_kernel(const __grid_constant__ AttentionBwdParams params, float* least_v_squares) {
    const AttentionProblem& problem = params.problem;
    const BlockSlots slots = BlockSlots::keys(problem, kKeys);
    const int64_t slot = blockIdx.x / problem.num_heads_kv;
    const int head = static_cast<int>(blockIdx.x % problem.num_heads_kv);
    const int64_t batch = slots.batch_of(slot);
    if (batch >= problem.batch_size) return;  // rows of no sequence
    const SeqlenInfo info = seqlen_info(problem, batch);
    const int64_t first_key = (slot - slots.first_slot(batch)) * kKeys;
    if (first_key < 0) return;
    const int64_t left = info.seqlen_k - first_key;
    const int keys = static_cast<int>(left < kKeys ? left : kKeys);

    // Squares are not negative, so they have the order of their bits.
    int least = 0x7f7fffff;  // the largest float
    for (int key = static_cast<int>(threadIdx.x) / kThreadsPerRow; key < kKeys;
         key += kThreads / kThreadsPerRow) {
        const uint16_t* row =
            static_cast<const uint16_t*>(params.v) +
            tensor_offset(params.v_strides, info.batch, info.row_k + first_key + key, head);
        const float squares =
            row_squares<Element, kThreadsPerRow>(row, key < keys ? problem.head_dim_v / 8 : 0);
        // Not of NaN: an output that holds one is taken for one key anyway.
        if (key < keys && squares < __int_as_float(least)) least = __float_as_int(squares);
    }
    least = __reduce_min_sync(0xffffffffu, least);
    if (threadIdx.x % 32 == 0) {
        atomicMin(reinterpret_cast<int*>(&least_v_squares[batch * problem.num_heads_kv + head]),
                  least);
    }
}

constexpr int kSinkThreads = 128;

/// One CTA takes a block of query rows and a head.
__global__ void __launch_bounds__(kSinkThreads)
    sink_parts_kernel(const __grid_constant__ AttentionBwdParams params,
                      const __grid_constant__ BwdWorkspace workspace, const int block_m) {
    __shared__ float warp_sums[kSinkThreads / 32];
    const AttentionProblem& problem = params.problem;
    const int64_t tile = blockIdx.x;
    const int64_t head = tile / BlockSlots::queries(problem, block_m).count();
    const float sink_log2 = load_as_float(problem.s_aux, problem.s_aux_dtype, head) * kLog2E;
    float sum = 0.0f;
    for (int row = static_cast<int>(threadIdx.x); row < block_m; row += kSinkThreads) {
        const int64_t i = tile * block_m + row;
        // Rows that do not exist or see no key have an LSE of +inf and a delta of 0.
        sum -= ptx::ex2_approx(sink_log2 - workspace.lse_log2[i]) * workspace.delta[i];
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (float part : warp_sums) total += part;
        workspace.sink_parts[tile] = total;
    }
}

}  // namespace

namespace cuda {

void find_least_v_squares(const AttentionBwdParams& params, float* least_v_squares, void* stream) {
    const AttentionProblem& problem = params.problem;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const int64_t ctas = BlockSlots::keys(problem, kKeys).count() * problem.num_heads_kv;
    if (least_v_bytes(params) == 0 || ctas == 0) return;
    // 3.4e38 for a sequence without keys, whose outputs are 0
    FAN_CUDA_CHECK(cudaMemsetAsync(least_v_squares, 0x7f, least_v_bytes(params), cuda_stream));
    const auto kernel =
        problem.dtype == DType::kBFloat16 ? least_v_kernel<BFloat16> : least_v_kernel<Float16>;
    kernel<<<grid_size("attention backward", ctas), kThreads, 0, cuda_stream>>>(params,
                                                                                least_v_squares);
    check_launch("attention backward, shortest values");
}

void renew_sink_parts(const AttentionBwdParams& params, const BwdWorkspace& workspace, int block_m,
                      void* stream) {
    const AttentionProblem& problem = params.problem;
    const int64_t tiles = BlockSlots::queries(problem, block_m).count() * problem.num_heads_q;
    if (params.ds_aux == nullptr || tiles == 0) return;
    sink_parts_kernel<<<grid_size("attention backward", tiles), kSinkThreads, 0,
                        static_cast<cudaStream_t>(stream)>>>(params, workspace, block_m);
    check_launch("attention backward, sink");
}

}  // namespace cuda

}  // namespace flash_attn_norm
