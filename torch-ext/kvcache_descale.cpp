#include "kvcache_descale.h"

#include <torch/csrc/stable/ops.h>

#include <limits>

#include "tensor_checks.h"

namespace flash_attn_norm {

namespace {

void check_descale(const KvCacheArguments& arguments, const char* name,
                   const std::optional<Tensor>& values, double factor, int64_t batch_size) {
    if (!is_float8_cache(arguments)) {
        if (!values && factor == 1.0) return;
        refuse(name, " is given, but k_cache has dtype ", arguments.k_cache.scalar_type(),
               "; it belongs to a cache of torch.float8_e4m3fn: pass None");
    }
    const double largest = std::numeric_limits<float>::max();
    const double smallest = std::numeric_limits<float>::min();
    if (!(factor >= smallest && factor <= largest)) {
        refuse(name, " is ", factor, "; it must be a positive number that float32 holds");
    }
    if (!values) return;
    if (values->scalar_type() != ScalarType::Float) {
        refuse(name, " has dtype ", values->scalar_type(), "; it must be torch.float32");
    }
    const int64_t num_heads_kv = arguments.k_cache.size(2), rank = values->dim();
    const bool fits =
        rank == 0 || (rank == 1 && values->size(0) == num_heads_kv) ||
        (rank == 2 && values->size(0) == batch_size && values->size(1) == num_heads_kv);
    if (!fits) {
        refuse(name, " has shape ", shape_text(*values),
               "; it must be a number, (num_heads_kv,) = (", num_heads_kv,
               ",) or (batch_size, num_heads_kv) = (", batch_size, ", ", num_heads_kv, ")");
    }
}

Descale describe_descale(const std::optional<Tensor>& values, double factor) {
    Descale descale;
    descale.factor = static_cast<float>(factor);
    if (!values) return descale;
    const int64_t rank = values->dim();
    descale.values = static_cast<const float*>(values->const_data_ptr());
    descale.batch_stride = rank == 2 ? values->stride(0) : 0;
    descale.head_stride = rank > 0 ? values->stride(rank - 1) : 0;
    return descale;
}

}  // namespace

bool is_float8_cache(const KvCacheArguments& arguments) {
    return arguments.k_cache.scalar_type() == ScalarType::Float8_e4m3fn;
}

void check_kvcache_descales(const KvCacheArguments& arguments, int64_t batch_size) {
    check_descale(arguments, "k_descale", arguments.k_descale, arguments.k_descale_factor,
                  batch_size);
    check_descale(arguments, "v_descale", arguments.v_descale, arguments.v_descale_factor,
                  batch_size);
}

void check_descale_values(const char* name, const std::optional<Tensor>& descale) {
    if (!descale) return;
    const Tensor values =
        torch::stable::to(torch::stable::contiguous(*descale),
                          torch::stable::Device(torch::headeronly::DeviceType::CPU));
    const float* const data = static_cast<const float*>(values.const_data_ptr());
    for (int64_t i = 0; i < values.numel(); ++i) {
        if (data[i] > 0.0f && data[i] <= std::numeric_limits<float>::max()) continue;
        refuse(name, " has the value ", static_cast<double>(data[i]),
               "; all must be positive and finite");
    }
}

void describe_descales(const KvCacheArguments& arguments, KvCacheLayout& cache) {
    cache.is_float8 = is_float8_cache(arguments);
    cache.k_descale = describe_descale(arguments.k_descale, arguments.k_descale_factor);
    cache.v_descale = describe_descale(arguments.v_descale, arguments.v_descale_factor);
}

}  // namespace flash_attn_norm
