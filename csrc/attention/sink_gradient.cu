#include <cuda_runtime.h>

#include "attention/element.cuh"
#include "attention/online_softmax.cuh"
#include "attention/sink_gradient.h"
#include "attention/tile_scheduler.h"
#include "common/check.h"
#include "common/launch.h"
#include "ptx/math.cuh"

namespace flash_attn_norm {

namespace {

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
