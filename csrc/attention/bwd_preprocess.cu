#include <cuda_runtime.h>

#include "attention/bwd_passes.h"
#include "attention/bwd_preprocess_kernel.cuh"
#include "attention/sm90/bwd_launch.h"
#include "common/check.h"
#include "common/launch.h"

namespace flash_attn_norm {

namespace {

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
    take(workspace.dq_turn, 2 * heads * q_slots);
    take(workspace.bias_turn, bias_in_turns ? turn_heads * q_slots * key_blocks : 0);
    workspace.counter_bytes = params.deterministic ? used : 0;
    take(workspace.lse_log2, heads * q_slots * block_m);
    take(workspace.delta, heads * q_slots * block_m);
    take(workspace.sink_parts, params.ds_aux != nullptr ? heads * q_slots : 0);
    const int64_t keys =
        problem.is_packed() ? problem.total_k : problem.batch_size * problem.seqlen_k;
    take(workspace.bias_parts, bias_columns_only ? heads * keys : 0);
    workspace.dq_tiles = heads * q_slots;
    if (dq_units > 0 || units_ahead > 0) {  // a dense problem
        workspace.units_per_batch_entry = problem.num_heads_kv * head_splits;
        workspace.units = problem.batch_size * workspace.units_per_batch_entry;
        workspace.zeroed_units = units_ahead;
    }
    if (dq_units > 0) {
        workspace.dq_tiles = workspace.dq_tiles / workspace.units * dq_units;
    }
    take(workspace.units_done, 2 * workspace.units);
    take(workspace.dq_accum, workspace.dq_tiles * dq.entries());
    const int64_t before_accum = used;
    const int64_t kv_tiles = head_splits > 1 ? problem.num_heads_kv * k_slots : 0;
    take(workspace.dk_accum, kv_tiles * dk.entries());
    take(workspace.dv_accum, kv_tiles * dv.entries());
    workspace.accum_bytes = used - before_accum;
    workspace.total_bytes = used;
    return workspace;
}

void bwd_preprocess(const AttentionBwdParams& params, const BwdPlan& plan,
                    const BwdPassOptions& options, cudaStream_t stream) {
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
    const int64_t zeroed_entries = options.first_stores_dq ? 0 : plan.dq.entries();
    if (options.dependent_launch) {
        sm90::launch_bwd_preprocess(params, workspace, plan.block_m, zeroed_entries, ctas, stream);
        return;
    }
    const auto kernel = problem.dtype == DType::kBFloat16 ? preprocess_kernel<BFloat16, false>
                                                          : preprocess_kernel<Float16, false>;
    kernel<<<grid_size("attention backward", ctas), kPreprocessThreads, 0, stream>>>(
        params, workspace, plan.block_m, zeroed_entries);
    check_launch("attention backward, preprocess");
}

}  // namespace flash_attn_norm
