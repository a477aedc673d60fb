#include <algorithm>

#include "attention/sm90/bwd_launch.h"
#include "attention/sm90/tensor_map.h"
#include "attention/tile_scheduler.h"

namespace flash_attn_norm {
namespace sm90 {

namespace {

constexpr int kLargestHeadDim = 256;

/// Keys that a row sees, on the average of all sequences: of a packed problem the host knows no
/// more.
int64_t keys_per_row(const AttentionProblem& problem) {
    const int64_t seqlen_k = problem.total_k / problem.batch_size;
    if (problem.window_left < 0 || problem.window_right < 0) return seqlen_k;
    return std::min(seqlen_k, problem.window_left + problem.window_right + 1);
}

bool is_masked(const AttentionProblem& problem) {
    return problem.window_left >= 0 || problem.window_right >= 0;
}

/// Whether the first part of dQ is stored. That saves the zeros, a fixed time for each row, but
/// CTAs wait for each other at every query block: measured.
bool first_stores_pay(const AttentionProblem& problem) {
    const bool small = std::max(problem.head_dim, problem.head_dim_v) <= 64;
    return small ? keys_per_row(problem) <= 8192 : bwd_tiles_are_short(problem);
}

}  // namespace

bool can_run_bwd(const AttentionBwdParams& params) {
    const AttentionProblem& problem = params.problem;
    const bool has_terms =
        problem.attn_bias != nullptr || problem.dropout_p > 0.0f || !(problem.softmax_scale > 0.0f);
    if (has_terms || params.dout == nullptr) return false;
    const bool empty = problem.batch_size == 0 || problem.total_q == 0 || problem.total_k == 0;
    if (empty) return false;
    if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) return false;
    if (std::max(problem.head_dim, problem.head_dim_v) > kLargestHeadDim) return false;
    // Tiles, rows and keys are counted in 32 bits, and a tile may have two CTAs.
    const int64_t tiles = BlockSlots::keys(problem, 64).count() * problem.num_heads_q;
    for (const int64_t count : {tiles, problem.batch_size, problem.total_q, problem.total_k}) {
        if (count >= int64_t{1} << 30) return false;
    }
    const TensorShape q = query_shape(problem, problem.head_dim);
    const TensorShape out = query_shape(problem, problem.head_dim_v);
    const TensorShape k = key_shape(problem, problem.head_dim);
    const TensorShape v = key_shape(problem, problem.head_dim_v);
    return can_map_tensor(q, params.q_strides, params.q) &&
           can_map_tensor(out, params.dout_strides, params.dout) &&
           can_map_tensor(k, params.k_strides, params.k) &&
           can_map_tensor(v, params.v_strides, params.v) &&
           can_map_tensor(k, contiguous_strides(k), params.dk) &&
           can_map_tensor(v, contiguous_strides(v), params.dv);
}

BwdPlan plan_bwd(const AttentionBwdParams& params, int num_sms) {
    const int head_dim = params.problem.head_dim, head_dim_v = params.problem.head_dim_v;
    const int larger = std::max(head_dim, head_dim_v);
    return larger <= 64        ? plan_bwd_class<64>(params, num_sms)
           : larger <= 128     ? plan_bwd_class<128>(params, num_sms)
           : head_dim_v <= 128 ? plan_bwd_cluster<128>(params, num_sms)
                               : plan_bwd_cluster<256>(params, num_sms);
}

bool bwd_tiles_are_short(const AttentionProblem& problem) {
    const int64_t keys = keys_per_row(problem);
    if (problem.group_size() > 1) return keys <= 1024;
    if (is_masked(problem)) return keys <= 2048;
    // Of longer ones the kernel for one tile rounds dQ as well, but of packed ones (bwd_dq_units).
    return problem.is_packed() ? keys <= 1024 : keys < 1024;
}

bool bwd_steps_are_wide(const AttentionProblem& problem) {
    // A mask's edge crosses larger blocks.
    return !is_masked(problem) || keys_per_row(problem) >= 4096;
}

BwdPassOptions bwd_pass_options(const AttentionBwdParams& params) {
    BwdPassOptions options;
    options.dependent_launch = true;
    // Where CTAs go through the same query blocks side by side, waiting costs more than the zeros.
    const AttentionProblem& problem = params.problem;
    const bool in_clusters = std::max(problem.head_dim, problem.head_dim_v) > 128;
    const bool may_store =
        is_masked(problem) || (!in_clusters && !problem.is_packed() && !has_score_terms(problem));
    options.first_stores_dq = may_store && first_stores_pay(problem);
    return options;
}

void launch_bwd(const AttentionBwdParams& params, const BwdPlan& plan, int num_sms,
                cudaStream_t stream) {
    const int head_dim = params.problem.head_dim, head_dim_v = params.problem.head_dim_v;
    const int larger = std::max(head_dim, head_dim_v);
    const auto launch = larger <= 64        ? launch_bwd_class<64>
                        : larger <= 128     ? launch_bwd_class<128>
                        : head_dim_v <= 128 ? launch_bwd_cluster<128>
                                            : launch_bwd_cluster<256>;
    launch(params, plan, num_sms, stream);
}

}  // namespace sm90
}  // namespace flash_attn_norm
