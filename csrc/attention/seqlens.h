#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/host_device.h"

namespace flash_attn_norm {

/// Where one sequence's rows lie in q, k, v, and how many there are.
struct SeqlenInfo {
    int64_t batch =
        0;  // index to multiply TensorStrides::batch with: the batch entry, 0 when packed
    int64_t row_q = 0;  // first row; 0 when dense
    int64_t row_k = 0;
    int64_t seqlen_q = 0;
    int64_t seqlen_k = 0;
};

/// [begin, end) of one entry of cu_seqlens, clamped to the rows there are, so that no value of an
/// index tensor can lead outside the tensor that it indexes.
struct RowRange {
    int64_t begin = 0;
    int64_t end = 0;
};

FAN_HOST_DEVICE RowRange packed_rows(const int32_t* cu_seqlens, int64_t batch, int64_t total) {
    const int64_t first = cu_seqlens[batch];
    const int64_t last = cu_seqlens[batch + 1];
    RowRange rows;
    rows.begin = first < 0 ? 0 : (first > total ? total : first);
    rows.end = last < rows.begin ? rows.begin : (last > total ? total : last);
    return rows;
}

FAN_HOST_DEVICE SeqlenInfo seqlen_info(const AttentionProblem& problem, int64_t batch) {
    SeqlenInfo info;
    if (problem.cu_seqlens_q != nullptr) {
        const RowRange q = packed_rows(problem.cu_seqlens_q, batch, problem.total_q);
        const RowRange k = packed_rows(problem.cu_seqlens_k, batch, problem.total_k);
        info.row_q = q.begin;
        info.row_k = k.begin;
        info.seqlen_q = q.end - q.begin;
        info.seqlen_k = k.end - k.begin;
    } else {
        info.batch = batch;
        info.seqlen_q = problem.seqlen_q;
        info.seqlen_k = problem.seqlen_k;
    }
    return info;
}

/// Offset of (sequence, head, row 0) in softmax_lse and in everything laid out like it.
FAN_HOST_DEVICE int64_t lse_offset(const AttentionProblem& problem, const SeqlenInfo& info,
                                   int64_t head) {
    return problem.cu_seqlens_q != nullptr
               ? head * problem.total_q + info.row_q
               : (info.batch * problem.num_heads_q + head) * problem.seqlen_q;
}

/// Offset of (sequence, row 0, head) in a tensor with these strides; `row` is row_q or row_k of
/// `info`.
FAN_HOST_DEVICE int64_t tensor_offset(const TensorStrides& strides, int64_t batch, int64_t row,
                                      int64_t head) {
    return batch * strides.batch + row * strides.row + head * strides.head;
}

}  // namespace flash_attn_norm
