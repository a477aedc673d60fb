#include <cuda_runtime.h>

#include "attention/delta_correction.h"
#include "attention/delta_kernel.cuh"
#include "attention/row_squares.cuh"
#include "common/check.h"
#include "common/launch.h"

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

/// The least sum of squares of a row of v, of each sequence and head.
void find_least_v_squares(const AttentionBwdParams& params, float* least_v_squares,
                          cudaStream_t stream) {
    const AttentionProblem& problem = params.problem;
    const int64_t ctas = BlockSlots::keys(problem, kKeys).count() * problem.num_heads_kv;
    if (least_v_bytes(params) == 0 || ctas == 0) return;
    // 3.4e38 for a sequence without keys, whose outputs are 0
    FAN_CUDA_CHECK(cudaMemsetAsync(least_v_squares, 0x7f, least_v_bytes(params), stream));
    const auto kernel =
        problem.dtype == DType::kBFloat16 ? least_v_kernel<BFloat16> : least_v_kernel<Float16>;
    kernel<<<grid_size("attention backward", ctas), kThreads, 0, stream>>>(params, least_v_squares);
    check_launch("attention backward, shortest values");
}

}  // namespace

namespace cuda {

void correct_delta(const AttentionBwdParams& params, float* delta, int block_m,
                   float* least_v_squares, void* stream) {
    const AttentionProblem& problem = params.problem;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const int64_t ctas =
        BlockSlots::queries(problem, DeltaTile::kRows).count() * problem.num_heads_q;
    if (ctas == 0) return;
    find_least_v_squares(params, least_v_squares, cuda_stream);
    const auto kernel =
        problem.dtype == DType::kBFloat16 ? delta_kernel<BFloat16> : delta_kernel<Float16>;
    kernel<<<grid_size("attention backward", ctas), DeltaTile::kThreads, 0, cuda_stream>>>(
        params, delta, block_m, least_v_squares);
    check_launch("attention backward, delta");
}

}  // namespace cuda

}  // namespace flash_attn_norm
