#pragma once

#include <cstdint>

#include "attention/decode/split_params.h"
#include "attention/element.cuh"
#include "attention/online_softmax.cuh"
#include "common/host_device.h"

namespace flash_attn_norm {
namespace decode {

/// Index of (query row, head) in softmax_lse; `row` counts over all sequences.
FAN_HOST_DEVICE int64_t lse_index(const SplitParams& params, int64_t row, int64_t batch, int head) {
    return params.is_packed() ? head * params.total_q + row
                              : (batch * (params.num_heads_q - 1) + head) * params.seqlen_q + row;
}

/// The sink of a head; -inf for none, and for rows that no sequence covers.
__device__ __forceinline__ float sink_of(const SplitParams& params, bool covered, int head) {
    return params.s_aux == nullptr || !covered
               ? negative_infinity()
               : load_as_float(params.s_aux, params.s_aux_dtype, head);
}

/// The sum of 2^score over a row's keys is sum * 2^max.
struct RowTotal {
    float max = 0.0f;  // base 2; -inf without a key
    float sum = 0.0f;

    __device__ __forceinline__ bool has_keys() const { return sum != 0.0f; }  // NaN stays
    /// Of a part of the keys.
    __device__ __forceinline__ float lse_log2() const {
        return has_keys() ? max + ptx::lg2_approx(sum) : negative_infinity();
    }

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
        normalizer = shrink * ptx::rcp_approx(total);
        return kLn2 * (top + ptx::lg2_approx(total));
    }
};

}  // namespace decode
}  // namespace flash_attn_norm
