#include <cuda_runtime.h>

#include "attention/bwd_passes.h"
#include "attention/element.cuh"
#include "common/check.h"
#include "common/launch.h"

namespace flash_attn_norm {

namespace {

/// A set of accumulator tiles and the tensor that they are rounded into.
struct GradientTiles {
    const float* sums = nullptr;  // [heads, slots, layout.entries()]
    uint16_t* gradient = nullptr;
    AccumulatorLayout layout;
    float scale = 1.0f;
    int num_heads = 0;
    int head_dim = 0;
    bool of_queries = false;
};

/// Transposes one tile of sums from register order to rows, through shared memory. kVector as in
/// AccumulatorLayout.
template <class Element, int kVector>
__global__ void round_kernel(const __grid_constant__ AttentionProblem problem,
                             const __grid_constant__ GradientTiles tiles) {
    extern __shared__ __align__(16) uint16_t shared_tile[];
    const AccumulatorLayout& layout = tiles.layout;
    const BlockSlots slots = tiles.of_queries ? BlockSlots::queries(problem, layout.rows)
                                              : BlockSlots::keys(problem, layout.rows);
    const int64_t num_slots = slots.count();
    const int64_t slot = blockIdx.x % num_slots;
    const int head = static_cast<int>(blockIdx.x / num_slots);
    const int64_t batch = slots.batch_of(slot);
    const int64_t first_row = (slot - slots.first_slot(batch)) * layout.rows;
    const SeqlenInfo info = seqlen_info_or_uncovered(problem, batch, tiles.of_queries);
    const int64_t seqlen = tiles.of_queries ? info.seqlen_q : info.seqlen_k;
    if (first_row < 0 || first_row >= seqlen) return;

    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32, warp = thread / 32;
    const int pitch = layout.columns + 8;
    const int row = warp % layout.warps_rows * layout.tiles_rows * 16 + lane / 4;
    const int column_in_warp = 2 * (lane % 4);
    const int column = warp / layout.warps_rows * layout.tiles_columns * 8 + column_in_warp;
    const int transposed_row = warp * 16 + lane / 4;
    const float* sums = tiles.sums + int64_t{blockIdx.x} * layout.entries();
    const auto put = [&](int m, int n, float e0, float e1, float e2, float e3) {
        if (kVector == 4 && layout.transposed) {
            uint16_t* place = shared_tile + (column_in_warp + 8 * n) * pitch + transposed_row;
            const uint32_t low = Element::pack(e0 * tiles.scale, e1 * tiles.scale);
            const uint32_t high = Element::pack(e2 * tiles.scale, e3 * tiles.scale);
            place[0] = static_cast<uint16_t>(low);
            place[pitch] = static_cast<uint16_t>(low >> 16);
            place[8] = static_cast<uint16_t>(high);
            place[pitch + 8] = static_cast<uint16_t>(high >> 16);
            return;
        }
        uint16_t* place = shared_tile + (row + 16 * m) * pitch + column + 8 * n;
        *reinterpret_cast<uint32_t*>(place) = Element::pack(e0 * tiles.scale, e1 * tiles.scale);
        *reinterpret_cast<uint32_t*>(place + 8 * pitch) =
            Element::pack(e2 * tiles.scale, e3 * tiles.scale);
    };
    if constexpr (kVector == 4) {
        const float4* entries = reinterpret_cast<const float4*>(sums) +
                                thread / 128 * (layout.tiles_columns * 128) + thread % 128;
#pragma unroll 8
        for (int n = 0; n < layout.tiles_columns; ++n) {
            const float4 entry = entries[n * 128];
            put(0, n, entry.x, entry.y, entry.z, entry.w);
        }
    } else {
        sums += thread;
        for (int m = 0; m < layout.tiles_rows; ++m) {
#pragma unroll 4
            for (int n = 0; n < layout.tiles_columns; ++n) {
                const float* entry = sums + (m * layout.tiles_columns + n) * 4 * layout.threads;
                put(m, n, entry[0], entry[layout.threads], entry[2 * layout.threads],
                    entry[3 * layout.threads]);
            }
        }
    }
    __syncthreads();

    const int64_t row_stride = int64_t{tiles.num_heads} * tiles.head_dim;
    const int64_t packed_row = tiles.of_queries
                                   ? info.batch * problem.seqlen_q + info.row_q + first_row
                                   : info.batch * problem.seqlen_k + info.row_k + first_row;
    uint16_t* gradient = tiles.gradient + packed_row * row_stride + int64_t{head} * tiles.head_dim;
    const int units = tiles.head_dim / 8;
    const int64_t left = seqlen - first_row;
    const int rows = static_cast<int>(left < layout.rows ? left : layout.rows);
    for (int i = thread; i < rows * units; i += layout.threads) {
        const int r = i / units, unit = i % units;
        *reinterpret_cast<uint4*>(gradient + r * row_stride + unit * 8) =
            *reinterpret_cast<const uint4*>(shared_tile + r * pitch + unit * 8);
    }
}

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

void round_tiles(const AttentionProblem& problem, const GradientTiles& tiles, cudaStream_t stream) {
    const AccumulatorLayout& layout = tiles.layout;
    const BlockSlots slots = tiles.of_queries ? BlockSlots::queries(problem, layout.rows)
                                              : BlockSlots::keys(problem, layout.rows);
    const int64_t ctas = slots.count() * tiles.num_heads;
    if (ctas == 0) return;
    const int bytes = layout.rows * (layout.columns + 8) * 2;
    const bool vectors = layout.vector == 4;
    const auto kernel = problem.dtype == DType::kBFloat16
                            ? (vectors ? round_kernel<BFloat16, 4> : round_kernel<BFloat16, 1>)
                            : (vectors ? round_kernel<Float16, 4> : round_kernel<Float16, 1>);
    kernel<<<grid_size("attention backward", ctas), layout.threads, bytes, stream>>>(problem,
                                                                                     tiles);
    check_launch("attention backward, postprocess");
}

}  // namespace

void bwd_postprocess(const AttentionBwdParams& params, const BwdPlan& plan, cudaStream_t stream) {
    const AttentionProblem& problem = params.problem;
    const BwdWorkspace workspace = plan.carve(params);

    GradientTiles tiles;
    tiles.sums = workspace.dq_accum;
    tiles.gradient = static_cast<uint16_t*>(params.dq);
    tiles.layout = plan.dq;
    tiles.scale = problem.softmax_scale;
    tiles.num_heads = problem.num_heads_q;
    tiles.head_dim = problem.head_dim;
    tiles.of_queries = true;
    round_tiles(problem, tiles, stream);

    if (plan.head_splits > 1) {
        tiles.num_heads = problem.num_heads_kv;
        tiles.of_queries = false;
        tiles.sums = workspace.dk_accum;
        tiles.gradient = static_cast<uint16_t*>(params.dk);
        tiles.layout = plan.dk;
        round_tiles(problem, tiles, stream);
        tiles.sums = workspace.dv_accum;
        tiles.gradient = static_cast<uint16_t*>(params.dv);
        tiles.layout = plan.dv;
        tiles.scale = 1.0f / (1.0f - problem.dropout_p);
        tiles.head_dim = problem.head_dim_v;
        round_tiles(problem, tiles, stream);
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
