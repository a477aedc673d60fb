#include "attention/sm90/fwd_launch.h"
#include "attention/sm90/tensor_map.h"
#include "attention/tile_scheduler.h"

namespace flash_attn_norm {
namespace sm90 {

namespace {

/// Packed sequences that fill half a tile at best, in the mean: the portable kernels, of which a
/// multiprocessor runs several CTAs with tiles of 64 rows, are faster (docs/attention_sm90.md).
bool has_short_sequences(const AttentionProblem& problem) {
    constexpr int64_t kShort = 64;
    return problem.is_packed() && problem.total_q <= kShort * problem.batch_size &&
           problem.total_k <= kShort * problem.batch_size;
}

}  // namespace

bool can_run_fwd(const AttentionFwdParams& params) {
    const AttentionProblem& problem = params.problem;
    if (problem.head_dim > 256 || problem.head_dim_v > 256) return false;
    if (problem.dropout_p > 0.0f || problem.attn_bias != nullptr) return false;
    if (!(problem.softmax_scale > 0.0f)) return false;  // the maximum would be a minimum
    if (problem.total_k == 0) return false;             // no tensor to map
    if (has_short_sequences(problem)) return false;
    // Tiles, rows and keys are counted in 32 bits.
    const int64_t largest = int64_t{1} << 30;
    const int64_t tiles = BlockSlots::queries(problem, 128).count() * problem.num_heads_q;
    for (const int64_t count : {tiles, problem.batch_size, problem.total_q, problem.total_k}) {
        if (count > largest) return false;
    }
    return can_map_tensor(query_shape(problem, problem.head_dim), params.q_strides, params.q) &&
           can_map_tensor(key_shape(problem, problem.head_dim), params.k_strides, params.k) &&
           can_map_tensor(key_shape(problem, problem.head_dim_v), params.v_strides, params.v);
}

}  // namespace sm90
}  // namespace flash_attn_norm
