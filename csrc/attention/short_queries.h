#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/decode/plan.h"
#include "attention/params.h"

/// Calls of attention_fwd with few query rows for each sequence: a step of generation over keys and
/// values that lie in ordinary tensors. The kernels of decode/ pack the query heads of a group into
/// one tile and share the keys of a sequence among CTAs, where the others would fill one row in 64.
namespace flash_attn_norm {

/// The same call as one to a cache: dense tensors are one entry for each sequence. Packed ones are
/// a single entry that all sequences share, of which each sees the positions between its two
/// numbers of cu_seqlens_k.
inline KvCacheAttentionParams as_cache_call(const AttentionFwdParams& params) {
    const AttentionProblem& problem = params.problem;
    KvCacheAttentionParams call;
    call.problem = problem;
    call.cache.k_strides = params.k_strides;
    call.cache.v_strides = params.v_strides;
    if (problem.is_packed()) {
        call.cache.num_entries = 1;
        call.cache.entry_rows = problem.total_k;
        call.cache.k_strides.batch = call.cache.v_strides.batch = 0;
        call.cache.cache_leftpad = problem.cu_seqlens_k;
        call.cache.cache_seqlens = problem.cu_seqlens_k + 1;
    } else {
        call.cache.num_entries = problem.batch_size;
        call.cache.entry_rows = problem.seqlen_k;
        call.cache.seqlen = problem.seqlen_k;
    }
    call.q = params.q;
    call.q_strides = params.q_strides;
    call.k_cache = params.k;
    call.v_cache = params.v;
    call.out = params.out;
    call.softmax_lse = params.softmax_lse;
    call.workspace = params.workspace;
    return call;
}

/// The same with as many keys for each sequence as they have in the mean: how a packed batch is cut
/// is decided by that, for its lengths are known on the device only.
inline KvCacheAttentionParams as_mean_cache_call(const AttentionFwdParams& params) {
    KvCacheAttentionParams call = as_cache_call(params);
    if (params.problem.is_packed()) {
        const int64_t batch_size = params.problem.batch_size;
        call.cache.entry_rows = (params.problem.total_k + batch_size - 1) / batch_size;
    }
    return call;
}

/// True where the kernels of decode/ are the faster ones: measured, see docs/decode.md. Rows are
/// packed ones, query rows times group_size.
inline bool is_faster_as_cache_call(const AttentionFwdParams& params, int num_sms) {
    const AttentionProblem& problem = params.problem;
    const int64_t rows = decode::packed_rows_per_sequence(problem);
    if (rows <= 16) return true;  // one tile of theirs
    const int64_t tile_rows = (rows / problem.group_size() + 127) / 128;
    const int64_t ctas = problem.batch_size * problem.num_heads_q * tile_rows;
    if (2 * ctas <= num_sms) {  // idle multiprocessors: enough keys to share among them?
        const int64_t keys = decode::max_visible_keys(as_mean_cache_call(params));
        return rows <= 256 && keys >= 1024 && keys >= 16 * rows;
    }
    return rows <= 64 && problem.group_size() > 1;  // K and V are read once for a group
}

/// Whether the kernels of decode/ have all that the call needs. They count in 32 bits, and have no
/// dropout and no bias; for a diagnosis they count as kernels of one card.
inline bool can_run_as_cache_call(const AttentionFwdParams& params) {
    const AttentionProblem& problem = params.problem;
    if (problem.batch_size == 0 || problem.force_portable) return false;
    if (problem.dropout_p > 0.0f || problem.attn_bias != nullptr) return false;
    constexpr int64_t kLargest = int64_t{1} << 30;
    const int64_t keys = problem.is_packed() ? problem.total_k : problem.seqlen_k;
    const int64_t rows =
        problem.is_packed() ? problem.total_q : problem.batch_size * problem.seqlen_q;
    return keys < kLargest && problem.batch_size <= kLargest / problem.num_heads_kv &&
           rows <= kLargest / problem.num_heads_q;
}

constexpr int64_t kAllRows = int64_t{1} << 62;

/// Sequences of up to how many query rows the kernels of decode/ take; 0: none, kAllRows: the call.
/// `can_share`: other kernels can take the longer ones of a packed call. Its lengths are not known
/// here, but where sequences of both kinds may matter, as many rows or keys are left over if each
/// has one: a prompt among steps of generation, or these among prompts.
inline int64_t rows_of_cache_call(const AttentionFwdParams& params, int num_sms, bool can_share) {
    if (!can_run_as_cache_call(params)) return 0;
    const AttentionProblem& problem = params.problem;
    const bool all = is_faster_as_cache_call(params, num_sms);
    const int64_t rows = decode::packed_rows_per_sequence(problem), group = problem.group_size();
    const int64_t tile = (all ? rows : group) <= 16 ? 16 : 64;  // of their kernels
    constexpr int64_t kManyRows = 512, kManyKeys = 4096;
    const bool shares = can_share && problem.is_packed() && problem.batch_size > 1 &&
                        group <= tile && rows <= (all ? tile : kAllRows) &&
                        (all ? problem.total_q - problem.batch_size >= kManyRows
                             : group > 1 && problem.total_k - problem.total_q >= kManyKeys);
    return shares ? tile / group : all ? kAllRows : 0;
}

}  // namespace flash_attn_norm
