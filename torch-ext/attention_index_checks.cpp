#include "attention_index_checks.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensor_checks.h"

#if defined(CUDA_KERNEL)
#include "device.h"
#endif

namespace flash_attn_norm {

namespace {

#if defined(CUDA_KERNEL)
/// Both tensors' values on the host, one after the other, with one sync.
std::vector<int32_t> read_from_device(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k) {
    const CudaContext context(cu_seqlens_q);
    if (context.is_capturing()) {
        throw std::runtime_error(
            "check_inputs(True) reads the values of cu_seqlens_q and cu_seqlens_k, which a CUDA "
            "graph capture forbids; call check_inputs(False) before the capture");
    }
    const int64_t count = cu_seqlens_q.size(0);
    Tensor both = torch::stable::new_empty(cu_seqlens_q, {2 * count});
    Tensor first = torch::stable::narrow(both, 0, 0, count);
    Tensor second = torch::stable::narrow(both, 0, count, count);
    torch::stable::copy_(first, cu_seqlens_q);
    torch::stable::copy_(second, cu_seqlens_k);
    const Tensor on_host =
        torch::stable::to(both, torch::stable::Device(torch::headeronly::DeviceType::CPU));
    const int32_t* const values = static_cast<const int32_t*>(on_host.const_data_ptr());
    return std::vector<int32_t>(values, values + 2 * count);
}
#endif

}  // namespace

void check_index_tensor(const char* name, const Tensor& tensor) {
    check_rank(name, tensor, 1, "(batch_size + 1,)");
    if (tensor.scalar_type() != ScalarType::Int) {
        refuse(name, " has dtype ", tensor.scalar_type(), "; it must be torch.int32, e.g. ", name,
               ".to(torch.int32)");
    }
    if (tensor.size(0) < 1) {
        refuse(name, " is empty; it must have batch_size + 1 elements, the first of them 0");
    }
    if (!tensor.is_contiguous()) refuse(name, " is not contiguous; pass ", name, ".contiguous()");
}

int64_t check_cumulative(const char* name, const int32_t* values, int64_t count,
                         const char* rows_name, int64_t rows) {
    if (values[0] != 0) {
        refuse(name, "[0] is ", values[0],
               "; it must be 0: ", name, " holds where each sequence begins, not its length. Of "
               "lengths: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)");
    }
    int64_t longest = 0;
    for (int64_t index = 1; index < count; ++index) {
        const int64_t length = int64_t{values[index]} - values[index - 1];
        if (length < 0) {
            refuse(name, " decreases at index ", index, ": ", values[index - 1], ", ",
                   values[index], "; its values must not decrease");
        }
        longest = std::max(longest, length);
    }
    if (values[count - 1] > rows) {
        refuse(name, " ends at ", values[count - 1], " but ", rows_name, " has ",
               counted(rows, "row"), "; its last value must be at most the number of rows");
    }
    return longest;
}

void check_index_values(const AttentionArguments& arguments, int64_t total_q, int64_t total_k) {
    const Tensor &cu_seqlens_q = *arguments.cu_seqlens_q, &cu_seqlens_k = *arguments.cu_seqlens_k;
    const int64_t count = cu_seqlens_q.size(0);
    std::vector<int32_t> values;
    if (arguments.q.is_cpu()) {
        const int32_t* const q = static_cast<const int32_t*>(cu_seqlens_q.const_data_ptr());
        const int32_t* const k = static_cast<const int32_t*>(cu_seqlens_k.const_data_ptr());
        values.assign(q, q + count);
        values.insert(values.end(), k, k + count);
    }
#if defined(CUDA_KERNEL)
    if (!arguments.q.is_cpu() && arguments.check_values) {
        values = read_from_device(cu_seqlens_q, cu_seqlens_k);
    }
#endif
    if (values.empty()) return;
    check_cumulative("cu_seqlens_q", values.data(), count, "q", total_q);
    const int64_t longest_k =
        check_cumulative("cu_seqlens_k", values.data() + count, count, "k", total_k);
    if (arguments.attn_bias && arguments.attn_bias->size(2) < longest_k) {
        refuse("attn_bias has ", counted(arguments.attn_bias->size(2), "column"),
               " but the longest sequence of cu_seqlens_k has ", counted(longest_k, "key"),
               "; it must have a column for each");
    }
}

void check_index_tensors(const AttentionArguments& arguments) {
    check_index_tensor("cu_seqlens_q", *arguments.cu_seqlens_q);
    check_index_tensor("cu_seqlens_k", *arguments.cu_seqlens_k);
    if (arguments.cu_seqlens_q->size(0) != arguments.cu_seqlens_k->size(0)) {
        refuse("cu_seqlens_q has ", counted(arguments.cu_seqlens_q->size(0), "element"),
               " and cu_seqlens_k has ", arguments.cu_seqlens_k->size(0),
               "; both must have batch_size + 1");
    }
}

}  // namespace flash_attn_norm
