#pragma once

#include <atomic>
#include <cstdint>

#include "attention/cpu/tile_engine.h"
#include "attention/params.h"
#include "attention/seqlens.h"
#include "common/cpu_runtime.h"

/// How a problem is cut into work items, and what an item needs to know of its sequence and head.
namespace flash_attn_norm {
namespace cpu {

/// Hands out aligned pieces of a workspace; without memory (nullptr) it counts bytes only.
class Arena {
  public:
    explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

    template <class T>
    T* take(int64_t count) {
        const int64_t offset = bytes_;
        bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
        return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + offset);
    }
    char* take_operands(int64_t count, const TileEngine& engine) {
        return take<char>(count * engine.operand_bytes);
    }
    int64_t bytes() const { return bytes_; }

  private:
    char* memory_;
    int64_t bytes_ = 0;
};

/// fn(worker, item) for every item, in increasing order, by whichever worker is free. Workers are
/// numbered from 0 to runtime.num_threads - 1.
template <class Fn>
void for_each_item(const CpuRuntime& runtime, const TileEngine& engine, int64_t num_items,
                   Fn&& fn) {
    if (num_items <= 0) return;
    std::atomic<int64_t> next_item{0};
    runtime.parallel_for(min_of(runtime.num_threads, num_items), 1, [&](int64_t worker, int64_t) {
        engine.enter();
        for (;;) {
            const int64_t item = next_item.fetch_add(1, std::memory_order_relaxed);
            if (item >= num_items) break;
            fn(worker, item);
        }
        engine.leave();
    });
}

struct MaxSeqlens {
    int64_t q = 0, k = 0;
};

inline MaxSeqlens max_seqlens(const AttentionProblem& problem) {
    MaxSeqlens longest;
    if (!problem.is_packed()) return MaxSeqlens{problem.seqlen_q, problem.seqlen_k};
    for (int64_t batch = 0; batch < problem.batch_size; ++batch) {
        const SeqlenInfo info = seqlen_info(problem, batch);
        longest.q = max_of(longest.q, info.seqlen_q);
        longest.k = max_of(longest.k, info.seqlen_k);
    }
    return longest;
}

inline Mask mask_of(const AttentionProblem& problem, const SeqlenInfo& info) {
    return Mask{info.seqlen_q, info.seqlen_k, problem.window_left, problem.window_right};
}

/// `rows` rows from `row` on, of one head of a sequence.
inline TensorRows tensor_rows(const void* data, DType dtype, const TensorStrides& strides,
                              int64_t batch, int64_t row, int64_t head, int64_t rows, int cols) {
    TensorRows result;
    if (data != nullptr) {
        const int64_t offset = tensor_offset(strides, batch, row, head);
        result.data = static_cast<const char*>(data) + offset * size_of(dtype);
    }
    result.dtype = dtype;
    result.row_stride = strides.row;
    result.rows = static_cast<int>(rows);
    result.cols = cols;
    return result;
}

/// Strides of a contiguous [batch, seqlen, heads, head_dim] or [total, heads, head_dim].
inline TensorStrides contiguous_strides(int64_t seqlen, int64_t num_heads, int64_t head_dim) {
    return TensorStrides{seqlen * num_heads * head_dim, num_heads * head_dim, head_dim};
}

ScoreTerms score_terms(const AttentionProblem& problem, const SeqlenInfo& info, int64_t batch,
                       int64_t head);

/// ScoreTerms::scale_log2() of any head.
float scale_log2_of(const AttentionProblem& problem);

/// The sink's logit of one head; -inf if there is none.
float sink_of(const AttentionProblem& problem, int64_t head);

/// std::exp2, whose version in glibc is of 2.29, as those of log and log2 are: later than
/// manylinux_2_28 allows.
double power_of_two(double x);

/// What is left to do of `rows` rows after their last key: lse with the sink's share, and factors,
/// which turn the sums of weighted values into outputs. row_max and row_sum as in SoftmaxState.
void finish_softmax(const AttentionProblem& problem, int64_t head, int rows, const float* row_max,
                    const float* row_sum, float* factors, float* lse);

/// Writes zeros to the rows of a contiguous packed tensor that no sequence covers.
void clear_uncovered_rows(const int32_t* cu_seqlens, int64_t batch_size, int64_t total,
                          int64_t row_bytes, void* data);

/// Writes the rows of packed results that no sequence covers: out 0, softmax_lse -inf.
void write_uncovered_results(const AttentionProblem& problem, void* out, float* softmax_lse);

}  // namespace cpu
}  // namespace flash_attn_norm
