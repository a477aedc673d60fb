#include <cuda_runtime.h>

#include "attention/bwd_passes.h"
#include "attention/bwd_round_kernel.cuh"
#include "attention/element.cuh"
#include "attention/sm90/bwd_launch.h"
#include "common/check.h"
#include "common/launch.h"

namespace flash_attn_norm {

namespace {

constexpr int kSumThreads = 256;

/// ds_aux[head]: the sum of the head's parts, always in the same order. One CTA per head.
__global__ void __launch_bounds__(kSumThreads)
    sum_sink_kernel(const float* __restrict__ parts, float* __restrict__ ds_aux,
                    const int64_t num_parts) {
    __shared__ float sums[kSumThreads];
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < num_parts; i += kSumThreads) {
        sum += parts[blockIdx.x * num_parts + i];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = kSumThreads / 2; half > 0; half /= 2) {
        if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) ds_aux[blockIdx.x] = sums[0];
}

/// The gradient of a bias without rows from its parts per head and key: one thread per entry.
__global__ void __launch_bounds__(kSumThreads)
    sum_bias_kernel(const __grid_constant__ AttentionBwdParams params,
                    const float* __restrict__ parts, const int64_t entries) {
    const AttentionProblem& problem = params.problem;
    const BiasStrides& strides = params.dattn_bias_strides;
    const int64_t entry = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
    if (entry >= entries) return;
    const int64_t column = entry % problem.bias_columns;
    const int64_t batch_head = entry / problem.bias_columns;
    const int64_t heads = strides.head != 0 ? problem.num_heads_q : 1;
    const bool over_batch = problem.is_packed() || strides.batch == 0;
    const int64_t head = batch_head % heads, batch = over_batch ? 0 : batch_head / heads;
    const int64_t head_end = strides.head != 0 ? head + 1 : problem.num_heads_q;
    const int64_t batch_end = over_batch ? problem.batch_size : batch + 1;
    const int64_t keys =
        problem.is_packed() ? problem.total_k : problem.batch_size * problem.seqlen_k;
    float sum = 0.0f;
    for (int64_t b = batch; b < batch_end; ++b) {
        const SeqlenInfo info = seqlen_info(problem, b);
        if (column >= info.seqlen_k) continue;
        const int64_t key = info.batch * problem.seqlen_k + info.row_k + column;
        for (int64_t h = head; h < head_end; ++h) sum += parts[h * keys + key];
    }
    static_cast<float*>(params.dattn_bias)[batch * strides.batch + head * strides.head + column] =
        sum;
}

void round_tiles(const AttentionProblem& problem, const GradientTiles& tiles, bool dependent,
                 cudaStream_t stream) {
    const AccumulatorLayout& layout = tiles.layout;
    const BlockSlots slots = tiles.of_queries ? BlockSlots::queries(problem, layout.rows)
                                              : BlockSlots::keys(problem, layout.rows);
    const int64_t ctas = slots.count() * tiles.num_heads;
    if (ctas == 0) return;
    if (dependent) return sm90::launch_bwd_round(problem, tiles, ctas, stream);
    const auto kernel = problem.dtype == DType::kBFloat16 ? round_kernel<BFloat16, false>
                                                          : round_kernel<Float16, false>;
    kernel<<<grid_size("attention backward", ctas), layout.threads, rounded_tile_bytes(layout),
             stream>>>(problem, tiles);
    check_launch("attention backward, postprocess");
}

}  // namespace

void bwd_postprocess(const AttentionBwdParams& params, const BwdPlan& plan,
                     const BwdPassOptions& options, cudaStream_t stream) {
    const AttentionProblem& problem = params.problem;
    const BwdWorkspace workspace = plan.carve(params);

    GradientTiles tiles;
    tiles.sums = workspace.dq_accum;
    tiles.parts = options.first_stores_dq ? workspace.dq_turn : nullptr;
    tiles.gradient = static_cast<uint16_t*>(params.dq);
    tiles.layout = plan.dq;
    tiles.scale = problem.softmax_scale;
    tiles.num_heads = problem.num_heads_q;
    tiles.head_dim = problem.head_dim;
    tiles.of_queries = true;
    if (plan.dq_units == 0) round_tiles(problem, tiles, options.dependent_launch, stream);

    if (plan.head_splits > 1) {
        tiles.num_heads = problem.num_heads_kv;
        tiles.of_queries = false;
        tiles.parts = nullptr;
        tiles.sums = workspace.dk_accum;
        tiles.gradient = static_cast<uint16_t*>(params.dk);
        tiles.layout = plan.dk;
        round_tiles(problem, tiles, options.dependent_launch, stream);
        tiles.sums = workspace.dv_accum;
        tiles.gradient = static_cast<uint16_t*>(params.dv);
        tiles.layout = plan.dv;
        tiles.scale = 1.0f / (1.0f - problem.dropout_p);
        tiles.head_dim = problem.head_dim_v;
        round_tiles(problem, tiles, options.dependent_launch, stream);
    }
    if (params.ds_aux != nullptr) {
        const int64_t parts = BlockSlots::queries(problem, plan.block_m).count();
        sum_sink_kernel<<<problem.num_heads_q, kSumThreads, 0, stream>>>(workspace.sink_parts,
                                                                         params.ds_aux, parts);
        check_launch("attention backward, sink");
    }
    if (params.dattn_bias != nullptr && params.dattn_bias_strides.row == 0) {
        const BiasStrides& strides = params.dattn_bias_strides;
        const int64_t batches = !problem.is_packed() && strides.batch != 0 ? problem.batch_size : 1;
        const int64_t heads = strides.head != 0 ? problem.num_heads_q : 1;
        const int64_t entries = batches * heads * problem.bias_columns;
        if (entries > 0) {
            sum_bias_kernel<<<grid_size("attention backward",
                                        (entries + kSumThreads - 1) / kSumThreads),
                              kSumThreads, 0, stream>>>(params, workspace.bias_parts, entries);
            check_launch("attention backward, bias");
        }
    }
}

}  // namespace flash_attn_norm
