#include "kvcache_checks.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention_checks.h"
#include "attention_index_checks.h"
#include "tensor_checks.h"

#if defined(CUDA_KERNEL)
#include "device.h"
#endif

namespace flash_attn_norm {

namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kLatentHeadDim = 576, kLatentHeadDimV = 512;  // multi-head latent attention

void check_devices(const KvCacheArguments& arguments) {
    const auto check = [&](const char* name, const std::optional<Tensor>& tensor) {
        if (tensor) check_device(name, *tensor, "q", arguments.q);
    };
    check("k_cache", arguments.k_cache);
    check("v_cache", arguments.v_cache);
    check("k", arguments.k);
    check("v", arguments.v);
    check("rotary_cos", arguments.rotary_cos);
    check("rotary_sin", arguments.rotary_sin);
    check("cu_seqlens_q", arguments.cu_seqlens_q);
    check("cu_seqlens_k", arguments.cu_seqlens_k);
    check("cache_seqlens", arguments.cache_seqlens);
    check("cache_batch_idx", arguments.cache_batch_idx);
    check("cache_leftpad", arguments.cache_leftpad);
    check("page_table", arguments.page_table);
    check("alibi_slopes", arguments.alibi_slopes);
    check("s_aux", arguments.s_aux);
}

void check_dtypes(const KvCacheArguments& arguments) {
    const ScalarType dtype = arguments.q.scalar_type();
    const auto check = [&](const char* name, const Tensor& tensor) {
        if (tensor.scalar_type() == dtype) return;
        refuse(name, " has dtype ", tensor.scalar_type(), " and q has ", dtype,
               "; they must have one dtype: cast q, or make the cache in q's");
    };
    check("k_cache", arguments.k_cache);
    check("v_cache", arguments.v_cache);
    if (arguments.k) check("k", *arguments.k);
    if (arguments.v) check("v", *arguments.v);
    if (!is_float_dtype(dtype)) {
        refuse("q and the cache have dtype ", dtype,
               "; allowed are torch.bfloat16, torch.float16 and, on the CPU, torch.float32");
    }
    if (dtype == ScalarType::Float && !arguments.q.is_cpu()) {
        refuse("q and the cache are torch.float32 on ", device_text(arguments.q),
               "; attention on a GPU takes torch.bfloat16 or torch.float16: cast them, or load the "
               "model in torch.bfloat16");
    }
}

/// (batch_size,) or (batch_size + 1,) int32.
void check_lengths(const char* name, const std::optional<Tensor>& tensor, int64_t batch_size) {
    if (!tensor) return;
    if (tensor->scalar_type() != ScalarType::Int) {
        refuse(name, " has dtype ", tensor->scalar_type(), "; it must be torch.int32, e.g. ", name,
               ".to(torch.int32)");
    }
    if (tensor->dim() != 1 || tensor->size(0) != batch_size) {
        refuse(name, " has shape ", shape_text(*tensor), "; it must be (batch_size,) = (",
               batch_size, ",)");
    }
    if (!tensor->is_contiguous()) refuse(name, " is not contiguous; pass ", name, ".contiguous()");
}

void check_page_table(const KvCacheArguments& arguments, int64_t batch_size) {
    const Tensor& table = *arguments.page_table;
    check_rank("page_table", table, 2, "(batch_size, pages_per_sequence)");
    if (table.scalar_type() != ScalarType::Int) {
        refuse("page_table has dtype ", table.scalar_type(),
               "; it must be torch.int32, e.g. page_table.to(torch.int32)");
    }
    if (table.size(0) != batch_size) {
        refuse("page_table has shape ", shape_text(table), "; it must have a row for each of the ",
               batch_size, " sequences");
    }
    if (!has_unit_last_stride(table)) {
        refuse("page_table has stride ", table.stride(1),
               " between the pages of a sequence; it must be 1: pass page_table.contiguous()");
    }
    if (arguments.cache_batch_idx) {
        refuse(
            "cache_batch_idx and page_table are both given; a page table says itself where each "
            "sequence lies: pass page_table[cache_batch_idx] alone");
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
    check_rank("k_cache", k, 4,
               paged ? "(num_pages, page_size, num_heads_kv, head_dim)"
                     : "(batch_size_cache, seqlen_cache, num_heads_kv, head_dim)");
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
        refuse("q has ", num_heads_q, " heads and the cache has ", num_heads_kv,
               "; num_heads_q must be a positive multiple of num_heads_kv");
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
               ", ", arguments.k->size(1), ", ", cache.size(2), ", ", cache.size(3), ")");
    };
    check_rows("k", *arguments.k, k_cache);
    check_rows("v", *arguments.v, v_cache);
    if (k_cache.const_data_ptr() == v_cache.const_data_ptr() && arguments.k->numel() > 0) {
        refuse(
            "k_cache and v_cache begin at the same element, so that k and v would be written "
            "over each other; write such rows yourself, and pass k and v as None");
    }
    if (arguments.rotary_cos.has_value() != arguments.rotary_sin.has_value()) {
        refuse(arguments.rotary_cos ? "rotary_sin" : "rotary_cos",
               " is missing; a rotation takes both rotary_cos and rotary_sin");
    }
    if (!arguments.rotary_cos) return;
    const Tensor &cos = *arguments.rotary_cos, &sin = *arguments.rotary_sin;
    check_rank("rotary_cos", cos, 2, "(seqlen_rotary, rotary_dim / 2)");
    check_rank("rotary_sin", sin, 2, "(seqlen_rotary, rotary_dim / 2)");
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
        refuse("rotary_cos has shape ", shape_text(cos),
               "; it must have a row for each position and rotary_dim / 2 columns, rotary_dim "
               "being at most head_dim, ",
               k_cache.size(3));
    }
}

/// int32 values that the host may read, row by row.
struct [[gnu::visibility("hidden")]] HostValues {
    Tensor tensor;
    const int32_t* data = nullptr;
    int64_t row_stride = 0;

    explicit HostValues(const Tensor& on_device) : tensor(on_device) {
        if (!tensor.is_cpu()) {
            tensor = torch::stable::to(torch::stable::contiguous(tensor),
                                       torch::stable::Device(torch::headeronly::DeviceType::CPU));
        }
        data = static_cast<const int32_t*>(tensor.const_data_ptr());
        row_stride = tensor.dim() == 2 ? tensor.stride(0) : 1;
    }
    int64_t at(int64_t row, int64_t column = 0) const { return data[row * row_stride + column]; }
};

/// name[index], as errors say it.
std::string indexed(const char* name, int64_t index) {
    std::string text(name);
    text += "[";
    text += std::to_string(index);
    text += "]";
    return text;
}

/// How much a sequence may hold, in words.
std::string capacity_text(const KvCacheArguments& arguments, int64_t capacity) {
    std::string text = arguments.page_table ? "the page table has room for " : "the cache has ";
    text += std::to_string(capacity);
    if (!arguments.page_table) return text += " rows for each sequence";
    text += " (";
    text += std::to_string(arguments.page_table->size(1));
    text += " pages of ";
    text += std::to_string(arguments.k_cache.size(1));
    return text += ")";
}

/// One sequence that holds `stored` rows before the call.
void check_length(const KvCacheArguments& arguments, const std::string& name, int64_t stored,
                  int64_t capacity, int64_t rows_rotated) {
    const int64_t seqlen_new = arguments.seqlen_new();
    if (stored + seqlen_new > capacity) {
        const std::string room = capacity_text(arguments, capacity);
        if (!arguments.k) refuse(name, " is ", stored, ", but ", room);
        refuse(name, " is ", stored, " and k has ", seqlen_new, " new rows, but ", room,
               "; nothing was appended");
    }
    if (arguments.rotary_cos && stored + rows_rotated > arguments.rotary_cos->size(0)) {
        refuse(name, " is ", stored, " and ", rows_rotated,
               " rows are rotated from there on, but rotary_cos and rotary_sin have ",
               arguments.rotary_cos->size(0), " rows; nothing was appended");
    }
}

/// The pages that a sequence uses.
void check_pages(const KvCacheArguments& arguments, const HostValues& pages, int64_t batch,
                 int64_t begin, int64_t end) {
    const int64_t num_pages = arguments.k_cache.size(0), page_size = arguments.k_cache.size(1);
    for (int64_t page = page_size > 0 ? begin / page_size : 0; page * page_size < end; ++page) {
        const int64_t entry = pages.at(batch, page);
        if (entry >= 0 && entry < num_pages) continue;
        refuse("page_table[", batch, ", ", page, "] is ", entry, ", but the cache has ", num_pages,
               " pages");
    }
}

/// The values of index tensors, all of them before anything is written.
void check_values(const KvCacheArguments& arguments, const KvCacheLayout& cache, int64_t batch_size,
                  int64_t total_q, int64_t rows_rotated) {
    const auto values_of = [](const std::optional<Tensor>& tensor) {
        return tensor ? std::optional<HostValues>(*tensor) : std::nullopt;
    };
    const auto lengths = values_of(arguments.cache_seqlens),
               cu_k = values_of(arguments.cu_seqlens_k),
               entries = values_of(arguments.cache_batch_idx),
               leftpads = values_of(arguments.cache_leftpad),
               pages = values_of(arguments.page_table);
    if (arguments.cu_seqlens_q) {
        const HostValues cu_q(*arguments.cu_seqlens_q);
        check_cumulative("cu_seqlens_q", cu_q.data, batch_size + 1, "q", total_q);
    }
    if (cu_k) {
        check_cumulative("cu_seqlens_k", cu_k->data, batch_size + 1, "the page table",
                         std::numeric_limits<int32_t>::max());
    }
    for (int64_t batch = 0; batch < batch_size; ++batch) {
        int64_t stored = arguments.seqlen;
        if (lengths) stored = lengths->at(batch);
        if (lengths && stored < 0) continue;  // padding
        if (cu_k) stored = cu_k->at(batch + 1) - cu_k->at(batch);
        const std::string name = cu_k      ? indexed("cu_seqlens_k, the length of sequence", batch)
                                 : lengths ? indexed("cache_seqlens", batch)
                                           : std::string("cache_seqlens");
        check_length(arguments, name, stored, cache.capacity(), rows_rotated);
        const int64_t end = stored + arguments.seqlen_new();
        if (entries && (entries->at(batch) < 0 || entries->at(batch) >= cache.num_entries)) {
            refuse(indexed("cache_batch_idx", batch), " is ", entries->at(batch),
                   ", but the cache has ", cache.num_entries, " rows");
        }
        if (leftpads && (leftpads->at(batch) < 0 || leftpads->at(batch) > end)) {
            refuse(indexed("cache_leftpad", batch), " is ", leftpads->at(batch),
                   "; it must lie between 0 and the sequence's length, ", end);
        }
        if (pages) check_pages(arguments, *pages, batch, leftpads ? leftpads->at(batch) : 0, end);
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
    if (arguments.page_table) {
        cache.page_table = values_of(arguments.page_table);
        cache.page_table_stride = arguments.page_table->stride(0);
        cache.pages_per_sequence = arguments.page_table->size(1);
    }
    cache.cache_batch_idx = values_of(arguments.cache_batch_idx);
    cache.cache_leftpad = values_of(arguments.cache_leftpad);
    cache.cache_seqlens = values_of(arguments.cache_seqlens);
    cache.cu_seqlens_k = values_of(arguments.cu_seqlens_k);
    cache.seqlen = arguments.seqlen + arguments.seqlen_new();
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

void check_index_tensors(const KvCacheArguments& arguments, int64_t batch_size) {
    check_lengths("cache_seqlens", arguments.cache_seqlens, batch_size);
    check_lengths("cache_batch_idx", arguments.cache_batch_idx, batch_size);
    check_lengths("cache_leftpad", arguments.cache_leftpad, batch_size);
    if (arguments.cu_seqlens_k) {
        check_index_tensor("cu_seqlens_k", *arguments.cu_seqlens_k);
        if (arguments.cu_seqlens_k->size(0) != batch_size + 1) {
            refuse("cu_seqlens_k has ", arguments.cu_seqlens_k->size(0),
                   " elements; it must have batch_size + 1 = ", batch_size + 1);
        }
    }
    if (arguments.page_table) check_page_table(arguments, batch_size);
    if (!arguments.page_table && !arguments.cache_batch_idx &&
        arguments.k_cache.size(0) < batch_size) {
        refuse("k_cache has shape ", shape_text(arguments.k_cache), ", but there are ", batch_size,
               " sequences; it must have a row for each, or cache_batch_idx must say which is "
               "whose");
    }
}

bool may_read_values(const KvCacheArguments& arguments) {
#if defined(CUDA_KERNEL)
    if (!arguments.q.is_cpu()) {
        if (arguments.check_values && CudaContext(arguments.q).is_capturing()) {
            throw std::runtime_error(
                "check_inputs(True) reads the values of index tensors, which a CUDA graph capture "
                "forbids; call check_inputs(False) before the capture");
        }
        return arguments.check_values;
    }
#endif
    return true;
}

}  // namespace

KvCacheAttentionParams check_kvcache(KvCacheArguments& arguments) {
    check_devices(arguments);
    check_dtypes(arguments);
    check_cache_shapes(arguments);
    check_attention_scalars(arguments.softmax_scale, arguments.window_left, arguments.window_right,
                            arguments.softcap);
    if (arguments.num_splits < 0 || arguments.num_splits > std::numeric_limits<int32_t>::max()) {
        refuse("num_splits is ", arguments.num_splits, "; it must be 0 (own choice) or positive");
    }
    if (arguments.cu_seqlens_q) check_index_tensor("cu_seqlens_q", *arguments.cu_seqlens_q);
    const int64_t batch_size =
        arguments.cu_seqlens_q ? arguments.cu_seqlens_q->size(0) - 1 : arguments.q.size(0);
    check_index_tensors(arguments, batch_size);
    if (arguments.k) check_append(arguments, batch_size);
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
        refuse("k_cache has shape ", shape_text(arguments.k_cache),
               ": no pages, but page_table has ", params.cache.pages_per_sequence,
               " for each sequence");
    }

    const AttentionProblem& problem = params.problem;
    const bool advances =
        arguments.causal || arguments.window_left >= 0 || arguments.window_right >= 0;
    const int64_t rows_rotated =
        std::max(arguments.seqlen_new(), advances ? problem.seqlen_q : int64_t{1});
    if (!arguments.cache_seqlens && !arguments.cu_seqlens_k) {
        if (arguments.seqlen < 0) {
            refuse("cache_seqlens is ", arguments.seqlen, "; it must be at least 0");
        }
        check_length(arguments, "cache_seqlens", arguments.seqlen, params.cache.capacity(),
                     rows_rotated);
    }
    if (may_read_values(arguments)) {
        check_values(arguments, params.cache, batch_size, problem.total_q, rows_rotated);
    }
    return params;
}

}  // namespace flash_attn_norm
