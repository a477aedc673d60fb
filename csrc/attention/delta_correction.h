#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/host_device.h"

/// The backward pass takes delta = dout . out, and has `out` as it was stored. Without dropout a
/// row whose attention is one key has out = v, which 16 bits hold; with it out is v / (1 -
/// dropout_p), and the gradient of its score would be the rounding of that instead of 0. With
/// dropout the output of rows that may be such is therefore computed once more, and delta gets what
/// rounding took. So it is where sequences have few keys: there other terms (a sink, keys alike)
/// may leave gradients of 0 or little, too, and no larger ones beside them; and it costs little.
namespace flash_attn_norm {

/// In the mean.
inline constexpr int64_t kFewKeys = 32;

FAN_HOST_DEVICE bool has_few_keys(const AttentionProblem& problem) {
    return problem.is_packed() ? problem.total_k <= kFewKeys * problem.batch_size
                               : problem.seqlen_k <= kFewKeys;
}

inline bool needs_delta_correction(const AttentionBwdParams& params) {
    const AttentionProblem& problem = params.problem;
    return (problem.dropout_p > 0.0f || has_few_keys(problem)) &&
           problem.dtype != DType::kFloat32 && params.dout != nullptr;
}

/// False if no key can have nearly all weight of a row: its output, by the sum of its squares, is
/// shorter than half of what the shortest value alone would give. Half, for the other keys may take
/// a part of it away: the weight of 1 / 200 does if their values are up to 100 times as long.
/// (Where the heaviest key was dropped the output is small, and so is its rounding.)
FAN_HOST_DEVICE bool may_be_one_key(float out_squares, float least_v_squares, float dropout_p) {
    const float factor = 0.5f / (1.0f - dropout_p);
    return !(out_squares < factor * factor * least_v_squares);  // NaN: true
}

/// The forward pass that `params` is the gradient of. Its `out` is that of `params`, to be read
/// only; softmax_lse and workspace are null.
inline AttentionFwdParams forward_of(const AttentionBwdParams& params) {
    AttentionFwdParams forward;
    forward.problem = params.problem;
    forward.q = params.q;
    forward.k = params.k;
    forward.v = params.v;
    forward.q_strides = params.q_strides;
    forward.k_strides = params.k_strides;
    forward.v_strides = params.v_strides;
    forward.out = const_cast<void*>(params.out);
    return forward;
}

/// What makes a call of the portable forward kernel that part of the backward pass: it stores no
/// output, and adds dout . (output - out) to delta. An element of the output that does not round to
/// the stored one belongs to another call, or is put together of several, and adds nothing.
struct DeltaCorrection {
    const void* dout = nullptr;  // null: a forward pass
    TensorStrides dout_strides;
    float* delta = nullptr;                  // see BwdWorkspace; holds dout . out
    int block_m = 0;                         // of the backward pass' slots
    const float* least_v_squares = nullptr;  // [batch_size, num_heads_kv], see may_be_one_key
};

/// Bytes of least_v_squares; 0 if needs_delta_correction(params) is false.
inline int64_t least_v_bytes(const AttentionBwdParams& params) {
    return needs_delta_correction(params)
               ? params.problem.batch_size * params.problem.num_heads_kv * int64_t{sizeof(float)}
               : 0;
}

namespace cuda {
/// Fills it: the least sum of squares of a row of v, of each sequence and head. `stream` is a
/// cudaStream_t.
void find_least_v_squares(const AttentionBwdParams& params, float* least_v_squares, void* stream);
}  // namespace cuda

}  // namespace flash_attn_norm
