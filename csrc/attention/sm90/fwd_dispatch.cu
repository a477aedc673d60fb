#include "attention/sm90/fwd_launch.h"
#include "attention/sm90/fwd_tile_list.h"
#include "attention/sm90/tensor_map.h"
#include "attention/tile_scheduler.h"

namespace flash_attn_norm {
namespace sm90 {

int64_t fwd_workspace_bytes(const AttentionFwdParams& params) {
    return FwdTileLists::workspace_bytes(params.problem);
}

bool can_run_fwd(const AttentionFwdParams& params) {
    const AttentionProblem& problem = params.problem;
    if (problem.head_dim > 256 || problem.head_dim_v > 256) return false;
    if (problem.dropout_p > 0.0f || problem.attn_bias != nullptr) return false;
    if (!(problem.softmax_scale > 0.0f)) return false;  // the maximum would be a minimum
    if (problem.total_k == 0) return false;             // no tensor to map
    // Tiles, rows and keys are counted in 32 bits.
    const int64_t largest = int64_t{1} << 30;
    const int64_t tiles = BlockSlots::queries(problem, kShortRows).count() * problem.num_heads_q;
    for (const int64_t count : {tiles, problem.batch_size, problem.total_q, problem.total_k}) {
        if (count > largest) return false;
    }
    return can_map_tensor(query_shape(problem, problem.head_dim), params.q_strides, params.q) &&
           can_map_tensor(key_shape(problem, problem.head_dim), params.k_strides, params.k) &&
           can_map_tensor(key_shape(problem, problem.head_dim_v), params.v_strides, params.v);
}

}  // namespace sm90
}  // namespace flash_attn_norm
