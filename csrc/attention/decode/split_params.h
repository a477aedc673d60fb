#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/decode/plan.h"

namespace flash_attn_norm {
namespace decode {

/// True if the values are the first columns of the keys' rows.
inline bool values_in_keys(const KvCacheAttentionParams& params) {
    const TensorStrides &k = params.cache.k_strides, &v = params.cache.v_strides;
    return params.k_cache == params.v_cache && k.batch == v.batch && k.row == v.row &&
           k.head == v.head;
}

/// What the split kernel is told of a call: KvCacheAttentionParams and SplitPlan in the order in
/// which a CTA needs them, with everything inside a sequence in 32 bits (see check_sizes) and all
/// divisors prepared. The first instructions of a CTA are on the way of every call.
struct SplitParams {
    Divisor num_heads_kv;
    Divisor tiles_per_sequence;  // dense
    Divisor group_size;
    int batch_size = 0;
    int seqlen_q = 0;  // dense
    int num_splits = 1;
    int head_units = 0, head_units_v = 0;    // 16-byte units of a row of q and of out
    int cache_units = 0, cache_units_v = 0;  // of the cache
    DType dtype = DType::kBFloat16;          // of q and out
    const int32_t* cu_seqlens_q = nullptr;   // [batch_size + 1]; null: dense
    int64_t total_q = 0;
    int most_rows = 0;  // packed: a row tile for each sequence, of which longer ones are left out

    int window_left = -1, window_right = -1;  // -1: all
    KvCacheLayout cache;
    Divisor page_rows;
    const void* k_cache = nullptr;  // [num_entries, entry_rows, num_heads_kv, head_dim]
    const void* v_cache = nullptr;  // [num_entries, entry_rows, num_heads_kv, head_dim_v]
    bool values_in_keys = false;    // v_cache is the first columns of k_cache

    const void* q = nullptr;
    TensorStrides q_strides;
    float softmax_scale = 1.0f, softcap = 0.0f, scale_over_softcap = 0.0f;
    const float* alibi_slopes = nullptr;
    int64_t alibi_batch_stride = 0;

    int num_heads_q = 0;
    const void* s_aux = nullptr;
    DType s_aux_dtype = DType::kFloat32;
    void* out = nullptr;
    float* softmax_lse = nullptr;
    int64_t total_rows = 0;        // see SplitPlan
    float* partial_out = nullptr;  // [num_splits, total_rows, head_dim_v]; unused for one split
    float* partial_lse = nullptr;  // [num_splits, total_rows], base 2, -inf without a key

    static SplitParams of(const KvCacheAttentionParams& params, const SplitPlan& plan) {
        const AttentionProblem& problem = params.problem;
        const auto window = [](int64_t bound) {
            return static_cast<int>(std::min<int64_t>(bound, int64_t{1} << 30));
        };
        SplitParams p;
        p.num_heads_kv = Divisor::of(problem.num_heads_kv);
        p.tiles_per_sequence = Divisor::of(std::max<int64_t>(plan.tiles_per_sequence, 1));
        p.group_size = Divisor::of(problem.group_size());
        p.batch_size = static_cast<int>(problem.batch_size);
        p.seqlen_q = static_cast<int>(problem.seqlen_q);
        p.num_splits = plan.num_splits;
        p.head_units = problem.head_dim / 8;
        p.head_units_v = problem.head_dim_v / 8;
        const int unit_columns = params.cache.is_float8 ? 16 : 8;
        p.cache_units = (problem.head_dim + unit_columns - 1) / unit_columns;
        p.cache_units_v = (problem.head_dim_v + unit_columns - 1) / unit_columns;
        p.dtype = problem.dtype;
        p.cu_seqlens_q = problem.cu_seqlens_q;
        p.total_q = problem.total_q;
        p.most_rows = static_cast<int>(params.most_rows);
        p.window_left = window(problem.window_left);
        p.window_right = window(problem.window_right);
        // The last row sees all keys to its right: with one row there is no bound.
        if (!problem.is_packed() && problem.seqlen_q == 1) p.window_right = -1;
        p.cache = params.cache;
        p.page_rows = Divisor::of(std::max<int64_t>(params.cache.entry_rows, 1));
        p.k_cache = params.k_cache;
        p.v_cache = params.v_cache;
        p.values_in_keys = decode::values_in_keys(params);
        p.q = params.q;
        p.q_strides = params.q_strides;
        if (problem.is_packed()) p.q_strides.batch = 0;
        p.softmax_scale = problem.softmax_scale;
        p.softcap = problem.softcap;
        if (p.softcap > 0.0f) p.scale_over_softcap = p.softmax_scale / p.softcap;
        p.alibi_slopes = problem.alibi_slopes;
        p.alibi_batch_stride = problem.alibi_batch_stride;
        p.num_heads_q = problem.num_heads_q;
        p.s_aux = problem.s_aux;
        p.s_aux_dtype = problem.s_aux_dtype;
        p.out = params.out;
        p.softmax_lse = params.softmax_lse;
        p.total_rows = plan.total_rows;
        p.partial_out = static_cast<float*>(params.workspace);
        p.partial_lse = p.partial_out + plan.num_splits * plan.total_rows * problem.head_dim_v;
        return p;
    }

    FAN_HOST_DEVICE bool is_packed() const { return cu_seqlens_q != nullptr; }
    /// A scale that is not positive would turn the order of the scores around, and the mask's -inf
    /// into +inf.
    FAN_HOST_DEVICE bool has_terms() const {
        return softcap > 0.0f || alibi_slopes != nullptr || !(softmax_scale > 0.0f);
    }
};

}  // namespace decode
}  // namespace flash_attn_norm
