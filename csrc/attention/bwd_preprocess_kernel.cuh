#pragma once

#include "attention/bwd_passes.h"
#include "attention/element.cuh"
#include "attention/lse_log2.h"
#include "attention/online_softmax.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/streaming_load.cuh"

namespace flash_attn_norm {

constexpr int kPreprocessThreads = 256;
constexpr int kPreprocessThreadsPerRow = 8;
constexpr int kRowsAtOnce = kPreprocessThreads / kPreprocessThreadsPerRow;
constexpr int kPreprocessRows = 2;  // of a thread at a time

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

/// kPreprocessRows rows of out and dout, kRowsAtOnce apart, of which this thread has every
/// kPreprocessThreadsPerRow-th 16 bytes.
template <class Element>
struct OutRows {
    const uint4* out;
    const uint4* dout;  // null: zero
    int64_t out_step, dout_step;
    int units;  // of 16 bytes in a row

    __device__ __forceinline__ static OutRows make(const AttentionBwdParams& params,
                                                   const SeqlenInfo& info, int64_t row, int head) {
        const AttentionProblem& problem = params.problem;
        const int64_t out_stride = int64_t{problem.num_heads_q} * problem.head_dim_v;
        const int64_t out_row = info.batch * problem.seqlen_q + info.row_q + row;
        const int64_t dout_place =
            tensor_offset(params.dout_strides, info.batch, info.row_q + row, head);
        OutRows rows;
        rows.out = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(params.out) +
                                                  out_row * out_stride +
                                                  int64_t{head} * problem.head_dim_v);
        rows.dout = params.dout == nullptr
                        ? nullptr
                        : reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(params.dout) +
                                                         dout_place);
        rows.out_step = kRowsAtOnce * out_stride / 8;
        rows.dout_step = kRowsAtOnce * params.dout_strides.row / 8;
        rows.units = problem.head_dim_v / 8;
        return rows;
    }

    /// This thread's parts of the rows' products, 0 for rows from `end` on. All loads of two units
    /// are on their way before the first is used.
    __device__ __forceinline__ void products(int64_t end, float* sums) const {
        constexpr int kUnits = 2;
#pragma unroll
        for (int r = 0; r < kPreprocessRows; ++r) sums[r] = 0.0f;
        if (dout == nullptr) return;
        for (int first = static_cast<int>(threadIdx.x) % kPreprocessThreadsPerRow; first < units;
             first += kUnits * kPreprocessThreadsPerRow) {
            uint4 a[kPreprocessRows][kUnits], b[kPreprocessRows][kUnits];
#pragma unroll
            for (int r = 0; r < kPreprocessRows; ++r) {
#pragma unroll
                for (int u = 0; u < kUnits; ++u) {
                    const int unit = first + u * kPreprocessThreadsPerRow;
                    a[r][u] = b[r][u] = make_uint4(0, 0, 0, 0);
                    if (unit < units && r * kRowsAtOnce < end) {
                        a[r][u] = ptx::ld_global_cs(out + r * out_step + unit);
                        b[r][u] = dout[r * dout_step + unit];
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < kPreprocessRows; ++r) {
#pragma unroll
                for (int u = 0; u < kUnits; ++u) sums[r] += dot8<Element>(a[r][u], b[r][u]);
            }
        }
    }
};

/// Whether this pass zeroes the sums of dQ of a query head, and not the main kernel.
__device__ __forceinline__ bool zeroes_sums(const BwdWorkspace& workspace,
                                            const AttentionProblem& problem, int64_t batch,
                                            int head) {
    if (workspace.zeroed_units == 0) return true;
    const int units = static_cast<int>(workspace.units_per_batch_entry);
    return batch * units + head / (problem.num_heads_q / units) < workspace.zeroed_units;
}

/// One CTA prepares the block of query rows of one slot and head. kDependent: the main kernel is a
/// dependent launch. zeroed_entries: of each tile of dq_accum; 0 if the first part is stored.
template <class Element, bool kDependent>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess_kernel(const __grid_constant__ AttentionBwdParams params,
                      const __grid_constant__ BwdWorkspace workspace, const int block_m,
                      const int64_t zeroed_entries) {
    __shared__ float warp_sums[kPreprocessThreads / 32];
    if constexpr (kDependent) ptx::griddepcontrol_launch_dependents();
    const AttentionProblem& problem = params.problem;
    const BlockSlots slots = BlockSlots::queries(problem, block_m);
    const PassTile tile = PassTile::of(blockIdx.x, problem.num_heads_q, slots.count());
    const int head = tile.head;
    const int64_t batch = slots.batch_of(tile.slot);
    const int64_t first_row = (tile.slot - slots.first_slot(batch)) * block_m;
    const SeqlenInfo info = seqlen_info_or_uncovered(problem, batch, /*of_queries=*/true);
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t rows = first_row < 0 ? 0 : info.seqlen_q - first_row;

    // The main kernel's ticket.
    if (kDependent && blockIdx.x == 0 && thread == 0 && !params.deterministic) {
        *workspace.counters = 0;
    }
    if (tile.index < workspace.units && thread < 2) {
        workspace.units_done[thread * workspace.units + tile.index] = 0;
    }
    if (zeroed_entries == 0) {
        const int64_t tiles = slots.count() * problem.num_heads_q;
        if (thread < 2) workspace.dq_turn[thread * tiles + tile.index] = 0;
    } else if (rows > 0 && tile.index < workspace.dq_tiles &&
               zeroes_sums(workspace, problem, batch, head)) {
        float4* accum = reinterpret_cast<float4*>(workspace.dq_accum + tile.index * zeroed_entries);
        for (int64_t i = thread; i < zeroed_entries / 4; i += kPreprocessThreads) {
            accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    const int64_t lse_row = lse_offset(problem, info, head) + first_row;
    const float sink = params.ds_aux == nullptr
                           ? negative_infinity()
                           : load_as_float(problem.s_aux, problem.s_aux_dtype, head);
    float sink_sum = 0.0f;
    for (int first = thread / kPreprocessThreadsPerRow; first < block_m;
         first += kPreprocessRows * kRowsAtOnce) {
        float deltas[kPreprocessRows], lses[kPreprocessRows];
#pragma unroll
        for (int r = 0; r < kPreprocessRows; ++r) {  // on its way with the rows
            const int row = first + r * kRowsAtOnce;
            const bool is_wanted = row < rows && thread % kPreprocessThreadsPerRow == 0;
            lses[r] = is_wanted ? params.softmax_lse[lse_row + row] : 0.0f;
        }
        OutRows<Element>::make(params, info, first_row + first, head)
            .products((rows < block_m ? rows : block_m) - first, deltas);
#pragma unroll
        for (int r = 0; r < kPreprocessRows; ++r) {
            const int row = first + r * kRowsAtOnce;
            const bool valid = row < rows;
            float delta = deltas[r];
#pragma unroll
            for (int offset = 1; offset < kPreprocessThreadsPerRow; offset *= 2) {
                delta += __shfl_xor_sync(0xffffffffu, delta, offset);
            }
            if (thread % kPreprocessThreadsPerRow != 0 || row >= block_m) continue;
            // Rows that do not exist or see no key get probability exp2(score - inf) = 0.
            float lse_log2 = -negative_infinity();
            if (valid) {
                const float lse = lses[r];
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
            workspace.lse_log2[tile.index * block_m + row] = lse_log2;
            workspace.delta[tile.index * block_m + row] = delta;
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
        workspace.sink_parts[tile.index] = sum;
    }
}

}  // namespace flash_attn_norm
