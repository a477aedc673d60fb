#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"

namespace flash_attn_norm {

/// Distances in elements; the last dimension has unit stride. A packed tensor has no batch stride
/// (0).
struct TensorStrides {
    int64_t batch = 0;
    int64_t row = 0;
    int64_t head = 0;
};

/// Distances in elements of an additive bias; 0 where it is broadcast. Columns have unit stride.
struct BiasStrides {
    int64_t batch = 0;
    int64_t head = 0;
    int64_t row = 0;
};

/// What both passes need to know of the problem: sizes, masks, and every term that is added to a
/// score.
///
///     score = softmax_scale * q . k
///     score = softcap * tanh(score / softcap)                          if softcap > 0
///     score = score - alibi_slope * |row + seqlen_k - seqlen_q - key|  if alibi_slopes
///     score = score + attn_bias[row, key]                              if attn_bias
struct AttentionProblem {
    DType dtype = DType::kBFloat16;  // of q, k, v, out and their gradients

    int64_t batch_size = 0;  // packed: the number of sequences
    int64_t seqlen_q = 0;    // dense only
    int64_t seqlen_k = 0;    // dense only
    int64_t total_q = 0;     // rows of a packed q; dense: batch_size * seqlen_q
    int64_t total_k = 0;
    int num_heads_q = 0;
    int num_heads_kv = 0;  // divides num_heads_q
    int head_dim = 0;      // of queries and keys
    int head_dim_v = 0;    // of values and the output

    const int32_t* cu_seqlens_q = nullptr;  // [batch_size + 1], packed; null when dense
    const int32_t* cu_seqlens_k = nullptr;  // [batch_size + 1]

    float softmax_scale = 1.0f;
    float softcap = 0.0f;       // 0: off
    int64_t window_left = -1;   // keys to the left of the diagonal that a row sees; -1: all
    int64_t window_right = -1;  // likewise to the right; a causal mask is window_right = 0
    float dropout_p = 0.0f;     // probability of dropping, in [0, 1)
    const int64_t* rng_state = nullptr;  // [2] = seed, offset; null without dropout

    const float* alibi_slopes = nullptr;  // [num_heads_q] or [batch_size, num_heads_q]
    int64_t alibi_batch_stride = 0;       // 0 for [num_heads_q]

    const void* s_aux =
        nullptr;  // [num_heads_q], the sink: one more logit of every row, not scaled
    DType s_aux_dtype = DType::kFloat32;

    const void* attn_bias = nullptr;  // dense [batch_size, num_heads_q, seqlen_q, bias_columns]
                                      // packed [num_heads_q, total_q, bias_columns]
    DType attn_bias_dtype = DType::kFloat32;
    BiasStrides attn_bias_strides;  // packed: no batch stride; row counts packed rows
    int64_t bias_columns = 0;       // keys that attn_bias covers; at least the longest seqlen_k

    bool force_portable = false;  // for diagnosis: never the kernels of one card only

    FAN_HOST_DEVICE bool is_packed() const { return cu_seqlens_q != nullptr; }
    FAN_HOST_DEVICE int group_size() const { return num_heads_q / num_heads_kv; }
};

struct AttentionFwdParams {
    AttentionProblem problem;

    const void* q =
        nullptr;  // dense [batch_size, seqlen_q, num_heads_q, head_dim], packed [total_q, ...]
    const void* k =
        nullptr;  // dense [batch_size, seqlen_k, num_heads_kv, head_dim], packed [total_k, ...]
    const void* v =
        nullptr;  // dense [batch_size, seqlen_k, num_heads_kv, head_dim_v], packed [total_k, ...]
    TensorStrides q_strides, k_strides, v_strides;
    int64_t least_rows = 0;  // packed: sequences of fewer rows are left out, for other kernels

    void* out = nullptr;  // like q, with head_dim_v; contiguous
    float* softmax_lse =
        nullptr;  // dense [batch_size, num_heads_q, seqlen_q], packed [num_heads_q, total_q];
                  // natural log, sink included, -inf where a row sees no key

    void* workspace =
        nullptr;  // attention_fwd_workspace_bytes(params), 64-byte aligned; contents undefined
};

struct AttentionBwdParams {
    AttentionProblem problem;

    const void* q = nullptr;  // shapes as in AttentionFwdParams
    const void* k = nullptr;
    const void* v = nullptr;
    const void* out = nullptr;   // contiguous
    const void* dout = nullptr;  // like out; null: zero
    TensorStrides q_strides, k_strides, v_strides, dout_strides;

    const float* softmax_lse = nullptr;   // as written by the forward pass
    const float* dsoftmax_lse = nullptr;  // like softmax_lse, contiguous; null: zero

    void* dq = nullptr;          // like q, contiguous
    void* dk = nullptr;          // like k, contiguous: num_heads_kv heads, never num_heads_q
    void* dv = nullptr;          // like v, contiguous
    float* ds_aux = nullptr;     // [num_heads_q] in float32; null: not wanted
    void* dattn_bias = nullptr;  // like attn_bias with its broadcast dimensions of size 1,
                                 // contiguous; null: not wanted
    DType dattn_bias_dtype = DType::kFloat32;  // another one: see cuda::bias_gradient_dtype
    BiasStrides dattn_bias_strides;            // 0 where the gradient is summed over that dimension
    bool deterministic = false;

    void* workspace =
        nullptr;  // attention_bwd_workspace_bytes(params), 64-byte aligned; contents undefined
};

/// What the elements of a float8 cache are multiplied with, for each sequence and head.
struct Descale {
    float factor = 1.0f;
    const float* values = nullptr;  // [batch_size, num_heads_kv] by these strides; null: all 1
    int64_t batch_stride = 0, head_stride = 0;

    FAN_HOST_DEVICE float of(int64_t batch, int64_t head) const {
        return values == nullptr ? factor
                                 : factor * values[batch * batch_stride + head * head_stride];
    }
};

/// Where the keys and values of each sequence lie in a cache, and how many there are. Position p of
/// a sequence is row p of its cache entry, or row p % entry_rows of its page p / entry_rows; its
/// keys are the positions from its leftpad up to its length. kv_cache.h reads it.
///
///     length = cache_seqlens[batch] + seqlen                           if cache_seqlens
///     length = cu_seqlens_k[batch + 1] - cu_seqlens_k[batch] + seqlen  if cu_seqlens_k
///     length = seqlen                                                  otherwise
///
/// A negative entry of cache_seqlens marks a sequence of padding: it has no keys, and nothing is
/// appended to it. Index tensors lie on the device; whatever they hold, nothing outside the cache
/// is touched.
struct KvCacheLayout {
    int64_t num_entries = 0;             // cache rows of the batch, or pages
    int64_t entry_rows = 0;              // seqlen_cache, or page_size
    TensorStrides k_strides, v_strides;  // batch: from one entry to the next
    bool is_float8 = false;  // elements are e4m3, times k_descale and v_descale, not q's dtype
    Descale k_descale, v_descale;

    bool is_paged = false;                // page_table may be null where it has no elements
    const int32_t* page_table = nullptr;  // [batch_size, pages_per_sequence], entries
    int64_t page_table_stride = 0;        // from one sequence to the next; pages have unit stride
    int64_t pages_per_sequence = 0;

    const int32_t* cache_batch_idx = nullptr;  // [batch_size], entries; null: its own; no pages
    const int32_t* cache_leftpad = nullptr;    // [batch_size]; null: 0
    const int32_t* cache_seqlens = nullptr;    // [batch_size]; null: see length
    const int32_t* cu_seqlens_k = nullptr;  // [batch_size + 1], attention alone; null: see length
    int64_t seqlen =
        0;  // appending: where the new rows begin; attention: rows appended just before

    /// Positions that a sequence has at most.
    FAN_HOST_DEVICE int64_t capacity() const {
        return is_paged ? pages_per_sequence * entry_rows : entry_rows;
    }
};

/// Writes new rows of every sequence into the cache, at positions length, length + 1, ...; those
/// behind its capacity, and all of a sequence of padding or with an index outside the cache, are
/// left out. Rotates what it writes, and q.
///
/// Rotation of the first rotary_dim elements of a row at position p, by row min(p, rotary_rows - 1)
/// of the tables, in float32:  (x, y) -> (x * cos - y * sin, y * cos + x * sin), where y is the
/// element after x (interleaved) or rotary_dim / 2 after it.
///
/// A float8 cache gets what results divided by its descale, rounded once: see float_to_e4m3.
struct KvCacheAppendParams {
    DType dtype = DType::kBFloat16;  // of q, k, v and, unless it is float8, the cache
    KvCacheLayout cache;
    void* k_cache = nullptr;  // [num_entries, entry_rows, num_heads_kv, head_dim]
    void* v_cache = nullptr;  // [num_entries, entry_rows, num_heads_kv, head_dim_v]

    int64_t batch_size = 0;
    int64_t seqlen_new = 0;
    int num_heads_kv = 0;
    int head_dim = 0;
    int head_dim_v = 0;
    const void* k = nullptr;  // [batch_size, seqlen_new, num_heads_kv, head_dim]
    const void* v = nullptr;  // [batch_size, seqlen_new, num_heads_kv, head_dim_v]
    TensorStrides k_strides, v_strides;

    int rotary_dim = 0;                // even, at most head_dim; 0: no rotation, no q
    int64_t rotary_rows = 0;           // at least 1
    const void* rotary_cos = nullptr;  // [rotary_rows, rotary_dim / 2], contiguous
    const void* rotary_sin = nullptr;  // likewise
    DType rotary_dtype = DType::kFloat32;
    bool rotary_interleaved = false;
    bool rotary_advances = false;  // row i of q stands at length + i; false: all rows at length

    int64_t seqlen_q = 0;
    int num_heads_q = 0;
    const void* q = nullptr;  // [batch_size, seqlen_q, num_heads_q, head_dim]
    TensorStrides q_strides;
    void* q_rotated = nullptr;  // like q, contiguous; a position below 0 counts as 0
};

/// Attention of q to a cache, without gradients. In `problem` q is dense or packed as ever, but
/// seqlen_k, total_k and cu_seqlens_k are not used, dropout and attn_bias are off. head_dim and
/// head_dim_v are at most 512, or 576 and 512.
struct KvCacheAttentionParams {
    AttentionProblem problem;
    KvCacheLayout cache;
    int num_splits = 0;     // parts that the keys of a sequence are cut into at most; 0: own choice
    int64_t most_rows = 0;  // packed: sequences of more rows are left out, for other kernels, and
                            // no workspace is needed; 0: none is

    const void* q = nullptr;  // shape as in AttentionFwdParams
    TensorStrides q_strides;
    const void* k_cache = nullptr;  // [num_entries, entry_rows, num_heads_kv, head_dim]
    const void* v_cache = nullptr;  // [num_entries, entry_rows, num_heads_kv, head_dim_v]

    void* out = nullptr;  // shapes and contents as in AttentionFwdParams
    float* softmax_lse = nullptr;

    void* workspace =
        nullptr;  // attention_kvcache_workspace_bytes(params), 64-byte aligned; contents undefined
};

}  // namespace flash_attn_norm
