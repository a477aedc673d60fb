#pragma once

#include <cstdint>

#include "attention/dropout.h"
#include "attention/mask.h"
#include "attention/params.h"

/// What the attention loops ask of an instruction set. The loops are compiled once, for any
/// machine; each engine_*.cpp compiles these functions for one instruction set.
///
/// An operand is an element of a product: float, or bf16 in the engines that multiply bf16. Every
/// tile dimension is padded to a multiple of kPanel with zeros. An operand tile has one of two
/// forms:
///   A form: row-major.
///   B form: panels of kPanel columns, one after the other; in a panel the rows follow each other,
///           for bf16 in pairs: element (row, column) lies at (row / 2, column, row % 2).
namespace flash_attn_norm {
namespace cpu {

constexpr int kPanel = 32;
constexpr int kMaxHeadDim = 576;  // of a key-value cache; 512 elsewhere
constexpr int kMaxBlockN = 512;
constexpr int64_t kAlignment = 64;
constexpr float kLog2e = 1.4426950408889634f;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}
inline int64_t min_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}
inline int64_t max_of(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/// Rows of a user's tensor: `rows` rows of `cols` elements. null data: all zero.
struct TensorRows {
    const void* data = nullptr;
    DType dtype = DType::kFloat32;
    int64_t row_stride = 0;
    int rows = 0;
    int cols = 0;
};

/// c[m, n] (+)= a[m, k] * b[k, n]; m, n, k are multiples of kPanel, except that m may be anything
/// if only the first m rows of c matter.
struct GemmArgs {
    const void* a = nullptr;  // A form
    int64_t lda = 0;
    const void* b = nullptr;  // B form
    int64_t b_panel_stride = 0;
    float* c = nullptr;  // row-major
    int64_t ldc = 0;
    int m = 0, n = 0, k = 0;
    bool accumulate = false;
};

/// The terms of the scores of one head of one sequence; see AttentionProblem.
struct ScoreTerms {
    Mask mask;
    float softmax_scale = 1.0f;
    float softcap = 0.0f;
    float alibi_slope = 0.0f;
    bool has_alibi = false;
    const void* bias = nullptr;  // at row 0, key 0 of the sequence
    DType bias_dtype = DType::kFloat32;
    int64_t bias_row_stride = 0;
    bool has_dropout = false;
    Dropout dropout;
    float keep_scale = 1.0f;  // 1 / (1 - dropout_p)

    /// More than a scale and a mask: prepare_scores leaves natural units then. A scale that is not
    /// positive counts as more, since the -inf of a hidden key must not be multiplied with it.
    bool has_extra_terms() const {
        return softcap > 0.0f || has_alibi || bias != nullptr || !(softmax_scale > 0.0f);
    }
    /// What turns a prepared score into one for exp2.
    float scale_log2() const { return has_extra_terms() ? kLog2e : softmax_scale * kLog2e; }
};

/// One tile of scores, [rows, keys], row-major with leading dimension ld >= round_up(keys, kPanel).
struct ScoreTile {
    float* scores = nullptr;
    int64_t ld = 0;
    int64_t row_begin = 0, key_begin = 0;  // inside the sequence
    int rows = 0, keys = 0;
};

struct SoftmaxState {
    float* row_max = nullptr;     // [rows]
    float* row_sum = nullptr;     // [rows]
    float* correction = nullptr;  // [rows], out: what older sums and outputs are multiplied with
};

/// Which digits of P and dS are stored as operands: all, rounded, or in two steps the upper ones
/// and what they leave.
enum class OperandPart { kRounded, kUpper, kRest };

/// Terms of the backward pass of one tile.
struct GradientTile {
    OperandPart part = OperandPart::kRounded;
    const float* lse_log2 = nullptr;        // [rows]; +inf for a row that sees no key
    const float* delta = nullptr;           // [rows], rowsum(dout * out) - dsoftmax_lse
    const float* keep = nullptr;            // dropout factors, or null
    const float* softcap_factor = nullptr;  // derivative of the softcap, or null
    const float* dprobs = nullptr;          // dout v^T; leading dimension as the scores'

    void* probs_b = nullptr;  // B form of the dropped probabilities; null: not wanted
    void* dscores_a = nullptr;
    void* dscores_b = nullptr;
    int64_t dscores_lda = 0;
    int64_t b_panel_stride = 0;  // of probs_b and dscores_b
    float* dbias = nullptr;      // += gradient before the softcap's derivative; null: not wanted
    int64_t dbias_ld = 0;
};

struct TileEngine {
    const char* name;
    int operand_bytes;
    int fwd_block_m, fwd_block_n, bwd_block_m, bwd_block_n;

    /// Brackets all other calls of a thread: sets up and gives back its tile registers.
    void (*enter)();
    void (*leave)();

    /// a[row][col], rows and cols padded; lda in operands.
    void (*pack_a)(const TensorRows& src, void* a, int64_t lda);
    /// a[col][row].
    void (*pack_a_transposed)(const TensorRows& src, void* a, int64_t lda);
    /// b(row, col).
    void (*pack_b)(const TensorRows& src, void* b, int64_t panel_stride);
    /// b(col, row).
    void (*pack_b_transposed)(const TensorRows& src, void* b, int64_t panel_stride);

    void (*gemm)(const GemmArgs& args);

    /// Softcap, ALiBi and bias; -inf where a row does not see a key and in the padding of keys.
    /// softcap_factor: null, or the softcap's derivative, laid out like the scores.
    void (*prepare_scores)(const ScoreTerms& terms, const ScoreTile& tile, float* softcap_factor);
    /// 0 or keep_scale for each score.
    void (*dropout_factors)(const ScoreTerms& terms, const ScoreTile& tile, float* keep);
    /// Online softmax: probs (A form) = exp2((score - row_max) * scale_log2) * keep.
    void (*softmax_update)(const ScoreTile& tile, float scale_log2, const SoftmaxState& state,
                           const float* keep, void* probs, int64_t ldp);
    /// Probabilities and gradients of scores. B forms get zeros up to round_up(rows, kPanel).
    void (*softmax_gradient)(const ScoreTile& tile, float scale_log2, const GradientTile& gradient);

    /// Row r of x times factors[r].
    void (*scale_rows)(float* x, int64_t ld, int rows, int cols, const float* factors);
    /// dst[r][c] = src[r][c] * scale * (factors ? factors[r] : 1), in the tensor's dtype.
    void (*store_rows)(const float* src, int64_t ld, int rows, int cols, float scale,
                       const float* factors, void* dst, DType dtype, int64_t row_stride);
    /// dst[c][r] = src[r][c] * scale: src has `cols` columns, dst `cols` rows.
    void (*store_transposed)(const float* src, int64_t ld, int rows, int cols, float scale,
                             void* dst, DType dtype, int64_t row_stride);
    /// sums[r] = sum over c of a[r][c] * b[r][c].
    void (*dot_rows)(const TensorRows& a, const TensorRows& b, float* sums);

    /// The products of one query row without packing: scores[r] = q . keys[r], and
    /// acc_o += sum over r of probs[r] * values[r], probs in A form.
    void (*dot_keys)(const TensorRows& q, const TensorRows& keys, float* scores);
    void (*add_values)(const TensorRows& values, const void* probs, float* acc_o);
};

extern const TileEngine kPlainEngine;
#if defined(__x86_64__)
extern const TileEngine kAvx2Engine;
extern const TileEngine kAvx512Engine;
extern const TileEngine kAvx512Bf16Engine;
extern const TileEngine kAmxEngine;
#endif

/// The fastest engine of this machine for a dtype: bf16 engines for bf16 alone, because they would
/// cost fp16 its precision.
const TileEngine& select_engine(DType dtype);

}  // namespace cpu
}  // namespace flash_attn_norm
