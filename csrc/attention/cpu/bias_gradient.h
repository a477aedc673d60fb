#pragma once

#include <cstdint>

#include "attention/cpu/tile_engine.h"
#include "attention/cpu/work_items.h"
#include "attention/params.h"
#include "common/cpu_runtime.h"

namespace flash_attn_norm {
namespace cpu {

/// Rows of one query head that the backward pass reads.
struct QueryRows {
    TensorRows q, dout, out;
};

QueryRows query_rows(const AttentionBwdParams& params, const SeqlenInfo& info, int64_t head,
                     int64_t row, int64_t rows);

/// lse_log2 = log2(e) * softmax_lse, +inf for a row that sees no key, so that its probabilities
/// are 0; delta = rowsum(dout * out) - dsoftmax_lse, or of what exact_delta() found, if not null.
void softmax_terms(const AttentionBwdParams& params, const float* exact_delta,
                   const TileEngine& engine, const SeqlenInfo& info, int64_t head,
                   const QueryRows& query, int64_t row, float* lse_log2, float* delta);

int64_t bias_gradient_scratch_bytes(const AttentionBwdParams& params, const TileEngine& engine);

/// dattn_bias. A pass of its own that computes S and dP again: here a work item owns a tile of the
/// gradient and sums over everything the bias is broadcast to, in a fixed order, whereas an item of
/// the main pass owns keys of one KV head.
void bias_gradient(const AttentionBwdParams& params, const float* exact_delta,
                   const TileEngine& engine, const CpuRuntime& runtime, char* worker_memory,
                   int64_t worker_bytes);

}  // namespace cpu
}  // namespace flash_attn_norm
