#pragma once

#include <cstdint>

#include "attention/online_softmax.cuh"
#include "attention/params.h"
#include "common/host_device.h"

namespace flash_attn_norm {
namespace decode {

/// Index of (query row, head) in softmax_lse.
FAN_HOST_DEVICE int64_t lse_index(const AttentionProblem& problem, int64_t batch, int64_t row,
                                  int64_t row_q, int64_t head) {
    return problem.is_packed() ? head * problem.total_q + row_q + row
                               : (batch * problem.num_heads_q + head) * problem.seqlen_q + row;
}

/// The sum of 2^score over a row's keys is sum * 2^max.
struct RowTotal {
    float max = 0.0f;  // base 2; -inf without a key
    float sum = 0.0f;

    /// As OnlineSoftmax::finish: the LSE in natural units, and the factor of the output.
    __device__ __forceinline__ float finish(float sink, float& normalizer) const {
        if (sum == 0.0f) {
            normalizer = 0.0f;
            return sink;
        }
        const float sink_log2 = sink * kLog2E;
        const float top = fmaxf(max, sink_log2);
        const float shrink = ptx::ex2_approx(max - top);
        const float total = fmaf(sum, shrink, ptx::ex2_approx(sink_log2 - top));
        normalizer = shrink / total;
        return kLn2 * (top + ptx::lg2_approx(total));
    }
};

}  // namespace decode
}  // namespace flash_attn_norm
