#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/host_device.h"

/// The backward pass takes delta = dout . out, and has `out` as it was stored, in 16 bits. Where
/// one key has all the weight of a row, dP - delta is 0, and would be what rounding took from
/// `out`, or what is left in float32 of two sums of the same products in different order. Rows that
/// may be such get delta = sum_j P_j dP_j once more, of the softmax itself and of the same dP, bit
/// for bit, that the main kernel subtracts it from:
///  - with dropout, where `out` is as long as a single value would make it;
///  - where sequences have few keys, for there other terms (a sink, keys alike) may leave gradients
///    of 0 or little, too, and no larger ones beside them. P and dS are not rounded to 16 bits
///    there either: what rounding takes from them is multiplied as well;
///  - in packed sequences of few keys among longer ones, where the gradient of a sink is wanted:
///    theirs is most of it.
namespace flash_attn_norm {

/// In the mean, or of a sequence.
inline constexpr int64_t kFewKeys = 32;

FAN_HOST_DEVICE bool has_few_keys(const AttentionProblem& problem) {
    return problem.is_packed() ? problem.total_k <= kFewKeys * problem.batch_size
                               : problem.seqlen_k <= kFewKeys;
}

inline bool needs_delta_correction(const AttentionBwdParams& params) {
    const AttentionProblem& problem = params.problem;
    const bool may_need = problem.dropout_p > 0.0f || has_few_keys(problem) ||
                          (problem.is_packed() && params.ds_aux != nullptr);
    return may_need && problem.dtype != DType::kFloat32 && params.dout != nullptr;
}

/// Which rows are corrected, of those that are not left out by their output.
FAN_HOST_DEVICE bool corrects_sequence(const AttentionProblem& problem, int64_t seqlen_k) {
    return problem.dropout_p > 0.0f || has_few_keys(problem) || seqlen_k <= kFewKeys;
}
/// Whether rows are left out that may_be_one_key() is false for.
FAN_HOST_DEVICE bool corrects_single_keys_only(const AttentionProblem& problem, int64_t seqlen_k) {
    return !has_few_keys(problem) && seqlen_k > kFewKeys;
}

/// False if no key can have nearly all weight of a row: its output, by the sum of its squares, is
/// shorter than half of what the shortest value alone would give. Half, for the other keys may take
/// a part of it away: the weight of 1 / 200 does if their values are up to 100 times as long.
/// (Where the heaviest key was dropped the output is small, and so is its rounding.)
FAN_HOST_DEVICE bool may_be_one_key(float out_squares, float least_v_squares, float dropout_p) {
    const float factor = 0.5f / (1.0f - dropout_p);
    return !(out_squares < factor * factor * least_v_squares);  // NaN: true
}

/// What a row's delta is made of.
struct DeltaSums {
    float own = 0.0f;       // sum_j P_j dP_j
    float own_size = 0.0f;  // of the absolute terms
    float stored = 0.0f;    // dout . out
    float stored_size = 0.0f;
    float dout_size = 0.0f;  // sum |dout|
    float own_lse = 0.0f, stored_lse = 0.0f;

    /// False if the stored output is another call's, or put together of several: its LSE differs by
    /// more than float32 sums in another order do, so that other keys have a weight that shows, or
    /// its delta is farther from this call's than twice what rounding P and `out` may have changed.
    /// Rounding P_j by a factor of 1 + u changes delta by u P_j dP_j, rounding an element of `out`
    /// by u |dout out|, or |dout| 2^-25 where float16 has no more digits.
    FAN_HOST_DEVICE bool is_own(DType dtype) const {
        const float unit = dtype == DType::kBFloat16 ? 0.00390625f : 0.00048828125f;  // 2^-8, 2^-11
        const float lse_size = own_lse > 0.0f ? own_lse : -own_lse;
        const bool has_own_lse =
            distance(own_lse, stored_lse) <= 0.5f * unit + 3.8146973e-6f * lse_size;  // 2^-18
        return has_own_lse &&
               distance(own, stored) <= unit * (own_size + stored_size) + 5.9604645e-8f * dout_size;
    }

  private:
    FAN_HOST_DEVICE static float distance(float a, float b) { return a > b ? a - b : b - a; }
};

/// Bytes of the least sums of squares of a value, [batch_size, num_heads_kv], for may_be_one_key();
/// 0 if they are not needed.
inline int64_t least_v_bytes(const AttentionBwdParams& params) {
    const AttentionProblem& problem = params.problem;
    return needs_delta_correction(params) && problem.dropout_p > 0.0f && !has_few_keys(problem)
               ? problem.batch_size * problem.num_heads_kv * int64_t{sizeof(float)}
               : 0;
}

namespace cuda {
/// Puts right what bwd_preprocess() left in `delta` (see BwdWorkspace, with slots of block_m rows).
/// least_v_squares: least_v_bytes(params) of memory. `stream` is a cudaStream_t.
void correct_delta(const AttentionBwdParams& params, float* delta, int block_m,
                   float* least_v_squares, void* stream);
}  // namespace cuda

}  // namespace flash_attn_norm
