#include "kvcache_index_checks.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention_index_checks.h"
#include "kvcache_descale.h"
#include "tensor_checks.h"

#if defined(CUDA_KERNEL)
#include "device.h"
#endif

namespace flash_attn_norm {

namespace {

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
    check_rank("block_table", table, 2, "(batch_size, pages_per_sequence)");
    if (table.scalar_type() != ScalarType::Int) {
        refuse("block_table has dtype ", table.scalar_type(),
               "; it must be torch.int32, e.g. block_table.to(torch.int32)");
    }
    if (table.size(0) != batch_size) {
        refuse("block_table has shape ", shape_text(table),
               "; it must have a row for each sequence, batch_size = ", batch_size);
    }
    if (!has_unit_last_stride(table)) {
        refuse("block_table has stride ", table.stride(1),
               " between the pages of a sequence; it must be 1: pass block_table.contiguous()");
    }
    if (arguments.cache_batch_idx) {
        refuse(
            "cache_batch_idx and block_table are both given; a table says itself where each "
            "sequence lies: pass block_table[cache_batch_idx] alone");
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
    if (!arguments.page_table) return text + counted(capacity, "row") + " for each sequence";
    text += std::to_string(capacity);
    text += " (";
    text += counted(arguments.page_table->size(1), "page");
    text += " of ";
    text += std::to_string(arguments.k_cache.size(1));
    return text += ")";
}

/// One sequence that holds `stored` rows before the call.
void check_length(const KvCacheArguments& arguments, const std::string& name, int64_t stored,
                  int64_t capacity, int64_t rows_rotated) {
    const int64_t seqlen_new = arguments.seqlen_new();
    if (stored > capacity - seqlen_new) {  // no sum: stored may be any int
        const std::string room = capacity_text(arguments, capacity);
        if (!arguments.k) refuse(name, " is ", stored, ", but ", room);
        refuse(name, " is ", stored, " and k has ", counted(seqlen_new, "new row"), ", but ", room,
               "; nothing was appended");
    }
    if (arguments.rotary_cos && stored > arguments.rotary_cos->size(0) - rows_rotated) {
        refuse(name, " is ", stored, " and ", counted(rows_rotated, "row"),
               rows_rotated == 1 ? " is" : " are",
               " rotated from there on, but rotary_cos and rotary_sin have ",
               counted(arguments.rotary_cos->size(0), "row"), "; nothing was appended");
    }
}

/// The pages that hold positions [begin, end) of a sequence.
void check_pages(const KvCacheArguments& arguments, const HostValues& pages, int64_t batch,
                 int64_t begin, int64_t end) {
    const int64_t num_pages = arguments.k_cache.size(0), page_size = arguments.k_cache.size(1);
    for (int64_t page = page_size > 0 ? begin / page_size : 0; page * page_size < end; ++page) {
        const int64_t entry = pages.at(batch, page);
        if (entry >= 0 && entry < num_pages) continue;
        refuse("block_table[", batch, ", ", page, "] is ", entry, ", but the cache has ",
               counted(num_pages, "page"));
    }
}

/// The values of index tensors, all of them before anything is written.
void check_all(const KvCacheArguments& arguments, const KvCacheAttentionParams& params,
               int64_t rows_rotated) {
    const KvCacheLayout& cache = params.cache;
    const int64_t batch_size = params.problem.batch_size;
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
        check_cumulative("cu_seqlens_q", cu_q.data, batch_size + 1, "q", params.problem.total_q);
    }
    if (cu_k) {
        check_cumulative("cu_seqlens_k", cu_k->data, batch_size + 1, "block_table",
                         std::numeric_limits<int32_t>::max());
    }
    // Sequences of one length and one row of the table are alike: the first speaks for all, however
    // many there are.
    const bool alike = !lengths && !cu_k && !entries && !leftpads &&
                       (!pages || arguments.page_table->stride(0) == 0);
    const int64_t different = alike ? std::min<int64_t>(batch_size, 1) : batch_size;
    for (int64_t batch = 0; batch < different; ++batch) {
        if (lengths && lengths->at(batch) < 0) continue;  // padding
        int64_t stored = arguments.seqlen;
        if (lengths) stored += lengths->at(batch);
        if (cu_k) stored += cu_k->at(batch + 1) - cu_k->at(batch);
        const std::string name = cu_k      ? indexed("cu_seqlens_k, the length of sequence", batch)
                                 : lengths ? indexed("cache_seqlens", batch)
                                           : std::string("cache_seqlens");
        check_length(arguments, name, stored, cache.capacity(), rows_rotated);
        const int64_t end = stored + arguments.seqlen_new();
        if (entries && (entries->at(batch) < 0 || entries->at(batch) >= cache.num_entries)) {
            refuse(indexed("cache_batch_idx", batch), " is ", entries->at(batch),
                   ", but the cache has ", counted(cache.num_entries, "row"));
        }
        if (leftpads && (leftpads->at(batch) < 0 || leftpads->at(batch) > end)) {
            refuse(indexed("cache_leftpad", batch), " is ", leftpads->at(batch),
                   "; it must lie between 0 and the sequence's length, ", end);
        }
        const int64_t leftpad = leftpads ? leftpads->at(batch) : 0;
        // Read from leftpad on, written from `stored` on
        if (pages) check_pages(arguments, *pages, batch, std::min(leftpad, stored), end);
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

void check_kvcache_index_tensors(const KvCacheArguments& arguments, int64_t batch_size) {
    check_lengths("cache_seqlens", arguments.cache_seqlens, batch_size);
    check_lengths("cache_batch_idx", arguments.cache_batch_idx, batch_size);
    check_lengths("cache_leftpad", arguments.cache_leftpad, batch_size);
    if (arguments.cu_seqlens_k) {
        check_index_tensor("cu_seqlens_k", *arguments.cu_seqlens_k);
        if (arguments.cu_seqlens_k->size(0) != batch_size + 1) {
            refuse("cu_seqlens_k has ", counted(arguments.cu_seqlens_k->size(0), "element"),
                   "; it must have batch_size + 1 = ", batch_size + 1);
        }
    }
    if (arguments.page_table) check_page_table(arguments, batch_size);
    if (!arguments.page_table && !arguments.cache_batch_idx &&
        arguments.k_cache.size(0) < batch_size) {
        refuse("k_cache has shape ", shape_text(arguments.k_cache), ", but batch_size is ",
               batch_size,
               "; it must have a row for each sequence, or cache_batch_idx must say which is "
               "whose");
    }
}

void check_kvcache_values(const KvCacheArguments& arguments, const KvCacheAttentionParams& params) {
    const bool advances =
        arguments.causal || arguments.window_left >= 0 || arguments.window_right >= 0;
    const int64_t rows_rotated =
        std::max(arguments.seqlen_new(), advances ? params.problem.seqlen_q : int64_t{1});
    if (arguments.seqlen < 0) {
        refuse("cache_seqlens is ", arguments.seqlen, "; it must be at least 0");
    }
    if (!arguments.cache_seqlens && !arguments.cu_seqlens_k) {
        check_length(arguments, "cache_seqlens", arguments.seqlen, params.cache.capacity(),
                     rows_rotated);
    } else if (arguments.seqlen > params.cache.capacity()) {
        refuse("seqlen is ", arguments.seqlen, ", but ",
               capacity_text(arguments, params.cache.capacity()));
    }
    if (!may_read_values(arguments)) return;
    check_all(arguments, params, rows_rotated);
    check_descale_values("k_descale", arguments.k_descale);
    check_descale_values("v_descale", arguments.v_descale);
}

}  // namespace flash_attn_norm
