#include "kvcache_checks.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <string>

#include "attention_checks.h"
#include "attention_index_checks.h"
#include "kvcache_descale.h"
#include "kvcache_index_checks.h"
#include "memory_overlap.h"
#include "tensor_checks.h"

namespace flash_attn_norm {

namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kLatentHeadDim = 576, kLatentHeadDimV = 512;  // multi-head latent attention

/// Calls fn(name, tensor) for all that a call reads beside q and the caches.
template <class Fn>
void for_each_input(const KvCacheArguments& arguments, Fn&& fn) {
    fn("k", arguments.k);
    fn("v", arguments.v);
    fn("rotary_cos", arguments.rotary_cos);
    fn("rotary_sin", arguments.rotary_sin);
    fn("cu_seqlens_q", arguments.cu_seqlens_q);
    fn("cu_seqlens_k", arguments.cu_seqlens_k);
    fn("cache_seqlens", arguments.cache_seqlens);
    fn("cache_batch_idx", arguments.cache_batch_idx);
    fn("cache_leftpad", arguments.cache_leftpad);
    fn("block_table", arguments.page_table);
    fn("alibi_slopes", arguments.alibi_slopes);
    fn("s_aux", arguments.s_aux);
    fn("k_descale", arguments.k_descale);
    fn("v_descale", arguments.v_descale);
}

void check_devices(const KvCacheArguments& arguments) {
    const auto check = [&](const char* name, const std::optional<Tensor>& tensor) {
        if (tensor) check_device(name, *tensor, "q", arguments.q);
    };
    check("k_cache", arguments.k_cache);
    check("v_cache", arguments.v_cache);
    for_each_input(arguments, check);
}

void check_dtypes(const KvCacheArguments& arguments) {
    const ScalarType dtype = arguments.q.scalar_type();
    if (dtype == ScalarType::Float8_e4m3fn) {
        refuse("q has dtype ", dtype,
               "; it must be torch.bfloat16, torch.float16 or, on the CPU, torch.float32: only a "
               "cache may be float8");
    }
    const auto check = [&](const char* name, const Tensor& tensor, const std::string& cure) {
        if (tensor.scalar_type() == dtype) return;
        refuse(name, " has dtype ", tensor.scalar_type(), " and q has ", dtype,
               "; they must have one dtype: ", cure);
    };
    const auto check_cache = [&](const char* name, const Tensor& cache) {
        switch (cache.scalar_type()) {
            case ScalarType::Byte:
                refuse(name, " has dtype ", cache.scalar_type(),
                       "; pass bytes of float8 elements as ", name,
                       ".view(torch.float8_e4m3fn), which copies nothing, and another cache in "
                       "q's dtype, ",
                       dtype);
            case ScalarType::Float8_e5m2:
            case ScalarType::Float8_e4m3fnuz:
            case ScalarType::Float8_e5m2fnuz:
                refuse(name, " has dtype ", cache.scalar_type(),
                       "; of the float8 dtypes a cache may have torch.float8_e4m3fn alone");
            case ScalarType::Float8_e4m3fn:
                return;
            default:
                check(name, cache, "cast q, or make the cache in q's");
        }
    };
    check_cache("k_cache", arguments.k_cache);
    check_cache("v_cache", arguments.v_cache);
    if (arguments.k_cache.scalar_type() != arguments.v_cache.scalar_type()) {
        refuse("k_cache has dtype ", arguments.k_cache.scalar_type(), " and v_cache has ",
               arguments.v_cache.scalar_type(), "; they must have one dtype");
    }
    if (arguments.k) check("k", *arguments.k, "cast k, k.to(" + text(dtype) + ")");
    if (arguments.v) check("v", *arguments.v, "cast v, v.to(" + text(dtype) + ")");
    if (!is_float_dtype(dtype)) {
        refuse("q and the cache have dtype ", dtype,
               "; allowed are torch.bfloat16, torch.float16 and, on the CPU, torch.float32");
    }
    if (dtype == ScalarType::Float && !arguments.q.is_cpu()) {
        refuse(is_float8_cache(arguments) ? "q is" : "q and the cache are", " torch.float32 on ",
               device_text(arguments.q),
               "; attention on a GPU takes torch.bfloat16 or torch.float16: cast them, or load the "
               "model in torch.bfloat16");
    }
}

/// The caches' own shapes, and those of q.
void check_cache_shapes(const KvCacheArguments& arguments) {
    const Tensor &q = arguments.q, &k = arguments.k_cache, &v = arguments.v_cache;
    const bool packed = arguments.cu_seqlens_q.has_value(),
               paged = arguments.page_table.has_value();
    check_rank("q", q, packed ? 3 : 4,
               packed ? "(total_q, num_heads_q, head_dim)"
                      : "(batch_size, seqlen_q, num_heads_q, head_dim)");
    const char* const cache_shape =
        paged ? "(num_pages, page_size, num_heads_kv, head_dim)"
              : "(batch_size_cache, seqlen_cache, num_heads_kv, head_dim)";
    check_rank("k_cache", k, 4, cache_shape);
    check_rank("v_cache", v, 4,
               paged ? "(num_pages, page_size, num_heads_kv, head_dim_v)"
                     : "(batch_size_cache, seqlen_cache, num_heads_kv, head_dim_v)");
    for (int64_t dim = 0; dim < 3; ++dim) {
        if (k.size(dim) == v.size(dim)) continue;
        refuse("k_cache has shape ", shape_text(k), " and v_cache has shape ", shape_text(v),
               "; all but the last dimension must be equal");
    }
    const int64_t num_heads_q = q.size(q.dim() - 2), num_heads_kv = k.size(2);
    if (num_heads_kv < 1 || num_heads_q < 1 || num_heads_q % num_heads_kv != 0) {
        const int64_t rows = k.size(1);
        const bool transposed =
            rows > 0 && rows < num_heads_kv && num_heads_q > 0 && num_heads_q % rows == 0;
        refuse("q has ", counted(num_heads_q, "head"), " and the cache has ", num_heads_kv,
               "; num_heads_q must be a positive multiple of num_heads_kv",
               transposed ? transposed_text("k_cache", k, cache_shape) + ", and v_cache likewise"
                          : "");
    }
    if (num_heads_q > std::numeric_limits<int32_t>::max()) {
        refuse("q has ", num_heads_q, " heads; at most 2147483647 are allowed");
    }
    const int64_t head_dim = q.size(q.dim() - 1), head_dim_v = v.size(3);
    if (k.size(3) != head_dim) {
        refuse("q has head_dim ", head_dim, " and k_cache has head_dim ", k.size(3),
               "; they must be equal (only that of v_cache may differ)");
    }
    const bool latent = head_dim == kLatentHeadDim && head_dim_v == kLatentHeadDimV;
    if (!latent && (head_dim < 1 || head_dim > kMaxHeadDim)) {
        refuse("q and k_cache have head_dim ", head_dim, "; allowed are 1 to ", kMaxHeadDim,
               ", and ", kLatentHeadDim, " with ", kLatentHeadDimV, " in v_cache");
    }
    if (head_dim_v < 1 || head_dim_v > kMaxHeadDim) {
        refuse("v_cache has head_dim ", head_dim_v, "; allowed are 1 to ", kMaxHeadDim);
    }
    if (!has_unit_last_stride(k) || !has_unit_last_stride(v)) {
        refuse(has_unit_last_stride(k) ? "v_cache" : "k_cache",
               " has no unit stride in its last dimension; a cache is never copied for that: make "
               "it so that the elements of a row follow each other");
    }
}

/// Whether keys and values of the same entry share memory.
bool entries_share_memory(const Tensor& k_cache, const Tensor& v_cache) {
    const int64_t element_size = static_cast<int64_t>(k_cache.element_size());
    return MemoryOf(k_cache, 1)
        .shares(MemoryOf(v_cache, 1), (k_cache.stride(0) - v_cache.stride(0)) * element_size,
                k_cache.size(0));
}

/// What is written must be written once, and not be read as an input. Inputs may share memory with
/// each other, and with a cache that is only read.
void check_memory(const KvCacheArguments& arguments) {
    const MemoryOf k_cache(arguments.k_cache), v_cache(arguments.v_cache);
    // Which entries are written is the table's matter: all pages of one memory may be entries of
    // both caches, some in use for keys and others for values, as Transformers has them.
    const bool is_chosen = arguments.page_table || arguments.cache_batch_idx;
    const auto check_rows = [](const char* name, const Tensor& cache, const MemoryOf& memory) {
        if (!memory.overlaps_itself()) return;
        refuse(name, " has shape ", shape_text(cache), " and strides ", strides_text(cache),
               ": its elements share memory, so that a new row would be written over others; pass "
               "a cache of its own memory, e.g. ",
               name, ".contiguous(), or k and v as None");
    };
    check_rows("k_cache", arguments.k_cache, k_cache);
    check_rows("v_cache", arguments.v_cache, v_cache);
    if (is_chosen ? entries_share_memory(arguments.k_cache, arguments.v_cache)
                  : k_cache.shares(v_cache)) {
        refuse("k_cache and v_cache share memory", is_chosen ? " of one entry" : "",
               ", so that k and v would be written over each other; write such rows yourself, and "
               "pass k and v as None");
    }
    const auto check = [&](const char* name, const std::optional<Tensor>& input) {
        if (!input) return;
        const MemoryOf memory(*input);
        const bool in_k_cache = memory.shares(k_cache);
        if (!in_k_cache && !memory.shares(v_cache)) return;
        refuse(name, " shares memory with ", in_k_cache ? "k_cache" : "v_cache",
               ", which new rows are written into; pass ", name, ".clone()");
    };
    check("q", arguments.q);
    for_each_input(arguments, check);
}

/// What the refusal of new rows adds if they, or the cache, seem to have their heads first.
std::string transposed_rows_text(const char* name, const Tensor& rows, const Tensor& cache) {
    const std::string rows_name(name);
    if (rows.size(1) == cache.size(2)) {
        return "; " + rows_name + " looks transposed, pass " + rows_name + ".transpose(1, 2)";
    }
    if (rows.size(2) != cache.size(1)) return "";
    const std::string cache_name = rows_name + "_cache";
    return "; " + cache_name + " looks transposed, pass " + cache_name + ".transpose(1, 2)";
}

void check_table_rank(const char* name, const Tensor& table) {
    if (table.dim() == 2) return;
    std::string hint;
    if (table.dim() == 3) {
        hint =
            ". It seems to be a table of Transformers, which holds each angle twice: if it "
            "starts at position 0, pass " +
            std::string(name) + "[0, :, :" + text(table.size(2) / 2) +
            "], the other likewise, and rotary_interleaved=False";
    }
    refuse(name, " has shape ", shape_text(table), ", ", counted(table.dim(), "dimension"),
           "; expected 2: (seqlen_rotary, rotary_dim / 2), with a row for each position from 0 on",
           hint);
}

/// The new rows and the rotary tables.
void check_append(const KvCacheArguments& arguments, int64_t batch_size) {
    const Tensor &k_cache = arguments.k_cache, &v_cache = arguments.v_cache;
    const auto check_rows = [&](const char* name, const Tensor& rows, const Tensor& cache) {
        check_rank(name, rows, 4, "(batch_size, seqlen_new, num_heads_kv, head_dim)");
        if (rows.size(0) == batch_size && rows.size(1) == arguments.k->size(1) &&
            rows.size(2) == cache.size(2) && rows.size(3) == cache.size(3)) {
            return;
        }
        refuse(name, " has shape ", shape_text(rows),
               "; it must be (batch_size, seqlen_new, num_heads_kv, head_dim) = (", batch_size,
               ", ", arguments.k->size(1), ", ", cache.size(2), ", ", cache.size(3), ")",
               transposed_rows_text(name, rows, cache));
    };
    check_rows("k", *arguments.k, k_cache);
    check_rows("v", *arguments.v, v_cache);
    if (arguments.rotary_cos.has_value() != arguments.rotary_sin.has_value()) {
        refuse(arguments.rotary_cos ? "rotary_sin" : "rotary_cos",
               " is missing; a rotation takes both rotary_cos and rotary_sin");
    }
    if (!arguments.rotary_cos) return;
    const Tensor &cos = *arguments.rotary_cos, &sin = *arguments.rotary_sin;
    check_table_rank("rotary_cos", cos);
    check_table_rank("rotary_sin", sin);
    if (sin.size(0) != cos.size(0) || sin.size(1) != cos.size(1)) {
        refuse("rotary_cos has shape ", shape_text(cos), " and rotary_sin has shape ",
               shape_text(sin), "; they must be equal");
    }
    const ScalarType dtype = arguments.q.scalar_type();
    if (cos.scalar_type() != sin.scalar_type() ||
        (cos.scalar_type() != dtype && cos.scalar_type() != ScalarType::Float)) {
        refuse("rotary_cos has dtype ", cos.scalar_type(), " and rotary_sin has ",
               sin.scalar_type(), "; both must be torch.float32 or both q's, ", dtype);
    }
    if (cos.size(0) < 1 || cos.size(1) < 1 || 2 * cos.size(1) > k_cache.size(3)) {
        const bool holds_angles_twice = cos.size(1) == k_cache.size(3);
        refuse("rotary_cos has shape ", shape_text(cos),
               "; it must have a row for each position and rotary_dim / 2 columns, rotary_dim "
               "being at most head_dim, ",
               k_cache.size(3),
               holds_angles_twice ? ". It seems to hold each angle twice, as the tables of "
                                    "Transformers do: pass rotary_cos[:, :rotary_dim // 2], "
                                    "rotary_sin likewise, and rotary_interleaved=False"
                                  : "");
    }
}

KvCacheLayout describe_cache(const KvCacheArguments& arguments) {
    const auto values_of = [](const std::optional<Tensor>& tensor) {
        return tensor ? static_cast<const int32_t*>(tensor->const_data_ptr()) : nullptr;
    };
    const auto strides_of = [](const Tensor& cache) {
        return TensorStrides{cache.stride(0), cache.stride(1), cache.stride(2)};
    };
    KvCacheLayout cache;
    cache.num_entries = arguments.k_cache.size(0);
    cache.entry_rows = arguments.k_cache.size(1);
    cache.k_strides = strides_of(arguments.k_cache);
    cache.v_strides = strides_of(arguments.v_cache);
    describe_descales(arguments, cache);
    if (arguments.page_table) {
        cache.is_paged = true;
        cache.page_table = values_of(arguments.page_table);
        cache.page_table_stride = arguments.page_table->stride(0);
        cache.pages_per_sequence = arguments.page_table->size(1);
    }
    // So that no sum of positions overflows; a cache has as many rows only by stride 0.
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 4;
    const int64_t entries = cache.is_paged ? std::max<int64_t>(cache.pages_per_sequence, 1) : 1;
    if (cache.entry_rows > kMost / entries) {
        refuse("k_cache has shape ", shape_text(arguments.k_cache), "; at most ", kMost,
               " rows are allowed for each sequence");
    }
    cache.cache_batch_idx = values_of(arguments.cache_batch_idx);
    cache.cache_leftpad = values_of(arguments.cache_leftpad);
    cache.cache_seqlens = values_of(arguments.cache_seqlens);
    cache.cu_seqlens_k = values_of(arguments.cu_seqlens_k);
    return cache;
}

AttentionProblem describe_problem(KvCacheArguments& arguments, int64_t batch_size,
                                  int64_t capacity) {
    const Tensor& q = arguments.q;
    const bool packed = arguments.cu_seqlens_q.has_value();
    AttentionProblem problem;
    problem.dtype = to_dtype("q", q);
    problem.batch_size = batch_size;
    problem.seqlen_q = packed ? 0 : q.size(1);
    problem.total_q = packed ? q.size(0) : q.size(0) * q.size(1);
    problem.num_heads_q = static_cast<int>(q.size(q.dim() - 2));
    problem.num_heads_kv = static_cast<int>(arguments.k_cache.size(2));
    problem.head_dim = static_cast<int>(arguments.k_cache.size(3));
    problem.head_dim_v = static_cast<int>(arguments.v_cache.size(3));
    if (packed) {
        problem.cu_seqlens_q =
            static_cast<const int32_t*>(arguments.cu_seqlens_q->const_data_ptr());
    }
    problem.softmax_scale = static_cast<float>(arguments.softmax_scale);
    problem.softcap = static_cast<float>(arguments.softcap);
    // A bound that no pair of row and key can reach is no bound; see attention_checks.cpp.
    const auto reachable = [&](int64_t bound) {
        return bound >= problem.total_q + capacity ? -1 : bound;
    };
    problem.window_left = reachable(arguments.window_left);
    problem.window_right = arguments.causal ? 0 : reachable(arguments.window_right);
    // A single row is the last one, which sees all keys to its right: there are none.
    if (problem.seqlen_q == 1) problem.window_right = -1;
    describe_head_terms(arguments.alibi_slopes, arguments.s_aux, problem);
    return problem;
}

}  // namespace

KvCacheAttentionParams check_kvcache(KvCacheArguments& arguments) {
    check_devices(arguments);
    check_dtypes(arguments);
    check_cache_shapes(arguments);
    check_attention_scalars(arguments.softmax_scale, arguments.window_left, arguments.window_right,
                            arguments.softcap);
    if (arguments.num_splits < 0 || arguments.num_splits > std::numeric_limits<int32_t>::max()) {
        refuse("num_splits is ", arguments.num_splits,
               "; it must lie between 0 (own choice) and 2147483647");
    }
    if (arguments.cu_seqlens_q) check_index_tensor("cu_seqlens_q", *arguments.cu_seqlens_q);
    const int64_t batch_size =
        arguments.cu_seqlens_q ? arguments.cu_seqlens_q->size(0) - 1 : arguments.q.size(0);
    check_kvcache_index_tensors(arguments, batch_size);
    check_kvcache_descales(arguments, batch_size);
    if (arguments.k) {
        check_append(arguments, batch_size);
        check_memory(arguments);
    }
    if (arguments.alibi_slopes) {
        check_alibi_slopes(*arguments.alibi_slopes, arguments.q.size(arguments.q.dim() - 2),
                           batch_size);
    }
    if (arguments.s_aux) check_s_aux(*arguments.s_aux, arguments.q.size(arguments.q.dim() - 2));

    KvCacheAttentionParams params;
    params.cache = describe_cache(arguments);
    arguments.q = with_unit_last_stride(arguments.q);
    params.problem = describe_problem(arguments, batch_size, params.cache.capacity());
    params.num_splits = static_cast<int>(arguments.num_splits);
    if (params.cache.capacity() > 0 && params.cache.num_entries == 0 && batch_size > 0) {
        if (!params.cache.is_paged) {
            refuse("k_cache has shape ", shape_text(arguments.k_cache),
                   ": no row for any sequence, batch_size = ", batch_size);
        }
        refuse("k_cache has shape ", shape_text(arguments.k_cache),
               ": no pages, but block_table has ", params.cache.pages_per_sequence,
               " for each sequence");
    }

    check_kvcache_values(arguments, params);
    params.cache.seqlen = arguments.seqlen + arguments.seqlen_new();
    return params;
}

}  // namespace flash_attn_norm
