#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "attention/attention.h"
#include "attention_tensors.h"
#include "cpu_threads.h"
#include "kvcache_checks.h"
#include "tensor_checks.h"
#include "torch_binding.h"

#if defined(CUDA_KERNEL)
#include "device.h"
#endif

namespace fan = flash_attn_norm;

namespace {

using fan::KvCacheAppendParams;
using fan::KvCacheArguments;
using fan::KvCacheAttentionParams;
using fan::TensorStrides;
using torch::headeronly::ScalarType;

/// Where a call runs. Holds the device and its stream for all of the call's launches.
class [[gnu::visibility("hidden")]] Place {
  public:
    explicit Place(const Tensor& q) {
#if defined(CUDA_KERNEL)
        if (!q.is_cpu()) cuda_.emplace(q);
#else
        static_cast<void>(q);
#endif
    }

    /// Also refuses, on a GPU, sizes that no launch can have.
    int64_t workspace_bytes(const KvCacheAttentionParams& params) const {
#if defined(CUDA_KERNEL)
        if (cuda_) return fan::cuda::attention_kvcache_workspace_bytes(params);
#endif
        return fan::cpu::attention_kvcache_workspace_bytes(params, fan::torch_cpu_runtime());
    }

    void append(const KvCacheAppendParams& params) const {
#if defined(CUDA_KERNEL)
        if (cuda_) return fan::cuda::kvcache_append(params, cuda_->stream());
#endif
        fan::cpu::kvcache_append(params, fan::torch_cpu_runtime());
    }

    void attend(const KvCacheAttentionParams& params) const {
#if defined(CUDA_KERNEL)
        if (cuda_) return fan::cuda::attention_kvcache(params, cuda_->stream());
#endif
        fan::cpu::attention_kvcache(params, fan::torch_cpu_runtime());
    }

#if defined(CUDA_KERNEL)
  private:
    std::optional<fan::CudaContext> cuda_;  // none: on the CPU
#endif
};

/// The tensors that attention needs: made before anything is written into a cache, so that nothing
/// is if they do not fit into memory.
struct [[gnu::visibility("hidden")]] Buffers {
    Tensor out, softmax_lse;
    std::optional<Tensor> workspace;
    std::optional<Tensor> q, k_cache, v_cache;  // copies, of what a CUDA kernel cannot load
    std::optional<Tensor> trimmed_out;          // without the columns that fill up head_dim_v

    bool has_rows() const { return softmax_lse.numel() > 0; }
};

/// A CUDA kernel gets rows of 16-byte units: the head dims of `params` become those of such rows.
Buffers allocate_buffers(const Place& place, const KvCacheArguments& arguments,
                         KvCacheAttentionParams& params) {
    const Tensor& q = arguments.q;
    fan::AttentionProblem& problem = params.problem;
    if (!q.is_cpu()) {
        problem.head_dim = static_cast<int>(fan::padded_head_dim(problem.head_dim));
        problem.head_dim_v = static_cast<int>(fan::padded_head_dim(problem.head_dim_v));
    }
    Buffers buffers;
    buffers.out = fan::empty_like_device(q, fan::with_last(q, problem.head_dim_v), q.scalar_type());
    buffers.softmax_lse = fan::empty_like_device(q, fan::lse_shape(problem), ScalarType::Float);
    const int64_t head_dim_v = arguments.v_cache.size(3);
    if (problem.head_dim_v != head_dim_v) {
        buffers.trimmed_out =
            fan::empty_like_device(q, fan::with_last(q, head_dim_v), q.scalar_type());
    }
    if (!buffers.has_rows()) return buffers;
    buffers.workspace = fan::workspace_of(q, place.workspace_bytes(params));
    const auto copy_of = [&](const Tensor& tensor, bool is_loadable) {
        const bool is_read_in_place = q.is_cpu() || is_loadable;
        return is_read_in_place ? std::nullopt : std::make_optional(fan::empty_vector_rows(tensor));
    };
    // A rotated q is a new tensor, whose rows follow each other.
    buffers.q = copy_of(q, arguments.rotary_cos ? q.size(q.dim() - 1) == problem.head_dim
                                                : fan::has_vector_rows(q));
    buffers.k_cache = copy_of(arguments.k_cache, fan::has_vector_rows(arguments.k_cache));
    buffers.v_cache = copy_of(arguments.v_cache, fan::has_vector_rows(arguments.v_cache));
    params.out = buffers.out.mutable_data_ptr();
    params.softmax_lse = static_cast<float*>(buffers.softmax_lse.mutable_data_ptr());
    if (buffers.workspace) params.workspace = buffers.workspace->mutable_data_ptr();
    return buffers;
}

/// Fills the copies, which replace their originals in `arguments`.
void align_inputs(KvCacheArguments& arguments, Buffers& buffers, KvCacheAttentionParams& params) {
    if (arguments.q.is_cpu()) return;
    const auto align = [](Tensor& tensor, std::optional<Tensor>& copy) {
        if (!copy) return;
        fan::fill_vector_rows(*copy, tensor);
        tensor = *copy;
    };
    align(arguments.q, buffers.q);
    align(arguments.k_cache, buffers.k_cache);
    align(arguments.v_cache, buffers.v_cache);
    params.cache.k_strides = fan::strides_of(arguments.k_cache);
    params.cache.v_strides = fan::strides_of(arguments.v_cache);
}

/// `params` describes the attention that follows the append.
void append(const Place& place, KvCacheArguments& arguments, const KvCacheAttentionParams& params,
            bool rotary_interleaved) {
    const Tensor k = fan::with_unit_last_stride(*arguments.k);
    const Tensor v = fan::with_unit_last_stride(*arguments.v);
    const bool has_new_rows = k.numel() > 0;
    KvCacheAppendParams append;
    append.dtype = params.problem.dtype;
    append.cache = params.cache;
    append.cache.seqlen = arguments.seqlen;
    append.k_cache = arguments.k_cache.mutable_data_ptr();
    append.v_cache = arguments.v_cache.mutable_data_ptr();
    append.batch_size = params.problem.batch_size;
    append.seqlen_new = k.size(1);
    append.num_heads_kv = params.problem.num_heads_kv;
    append.head_dim = static_cast<int>(k.size(3));
    append.head_dim_v = static_cast<int>(v.size(3));
    append.k = k.const_data_ptr();
    append.v = v.const_data_ptr();
    append.k_strides = fan::strides_of(k);
    append.v_strides = fan::strides_of(v);
    if (!arguments.rotary_cos) {
        if (has_new_rows) place.append(append);
        return;
    }

    const Tensor cos = torch::stable::contiguous(*arguments.rotary_cos);
    const Tensor sin = torch::stable::contiguous(*arguments.rotary_sin);
    append.rotary_dim = static_cast<int>(2 * cos.size(1));
    append.rotary_rows = cos.size(0);
    append.rotary_cos = cos.const_data_ptr();
    append.rotary_sin = sin.const_data_ptr();
    append.rotary_dtype = fan::to_dtype("rotary_cos", cos);
    append.rotary_interleaved = rotary_interleaved;
    append.rotary_advances =
        arguments.causal || arguments.window_left >= 0 || arguments.window_right >= 0;
    append.seqlen_q = params.problem.seqlen_q;
    append.num_heads_q = params.problem.num_heads_q;
    append.q = arguments.q.const_data_ptr();
    append.q_strides = fan::strides_of(arguments.q);
    Tensor q_rotated =
        fan::empty_like_device(arguments.q, fan::shape_of(arguments.q), arguments.q.scalar_type());
    append.q_rotated = q_rotated.mutable_data_ptr();
    if (has_new_rows || q_rotated.numel() > 0) place.append(append);
    arguments.q = q_rotated;
}

/// Attention to the cache as it is now. Allocates nothing.
std::tuple<Tensor, Tensor> attend(const Place& place, KvCacheArguments& arguments,
                                  KvCacheAttentionParams& params, Buffers& buffers) {
    const Tensor& out = buffers.trimmed_out ? *buffers.trimmed_out : buffers.out;
    if (!buffers.has_rows()) return {out, buffers.softmax_lse};
    align_inputs(arguments, buffers, params);
    params.q = arguments.q.const_data_ptr();
    params.q_strides = fan::strides_of(arguments.q);
    params.k_cache = arguments.k_cache.const_data_ptr();
    params.v_cache = arguments.v_cache.const_data_ptr();
    place.attend(params);
    if (buffers.trimmed_out) {
        const int64_t last = out.dim() - 1;
        torch::stable::copy_(*buffers.trimmed_out,
                             torch::stable::narrow(buffers.out, last, 0, out.size(last)));
    }
    return {out, buffers.softmax_lse};
}

}  // namespace

std::tuple<Tensor, Tensor> attention_kvcache(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& cache_seqlens, const std::optional<Tensor>& cache_batch_idx,
    const std::optional<Tensor>& cache_leftpad, const std::optional<Tensor>& page_table,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& s_aux, int64_t seqlen,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    int64_t num_splits, bool check_values, const std::optional<Tensor>& k_descale,
    const std::optional<Tensor>& v_descale, double k_descale_factor, double v_descale_factor) {
    KvCacheArguments arguments{q,
                               k_cache,
                               v_cache,
                               std::nullopt,
                               std::nullopt,
                               std::nullopt,
                               std::nullopt,
                               cu_seqlens_q,
                               cu_seqlens_k,
                               cache_seqlens,
                               cache_batch_idx,
                               cache_leftpad,
                               page_table,
                               alibi_slopes,
                               s_aux,
                               seqlen,
                               softmax_scale,
                               causal,
                               window_left,
                               window_right,
                               softcap,
                               num_splits,
                               check_values,
                               k_descale,
                               v_descale,
                               k_descale_factor,
                               v_descale_factor};
    KvCacheAttentionParams params = fan::check_kvcache(arguments);
    const Place place(q);
    Buffers buffers = allocate_buffers(place, arguments, params);
    return attend(place, arguments, params, buffers);
}

std::tuple<Tensor, Tensor> attention_kvcache_append(
    Tensor k_cache, Tensor v_cache, const Tensor& q, const Tensor& k, const Tensor& v,
    const std::optional<Tensor>& rotary_cos, const std::optional<Tensor>& rotary_sin,
    const std::optional<Tensor>& cache_seqlens, const std::optional<Tensor>& cache_batch_idx,
    const std::optional<Tensor>& cache_leftpad, const std::optional<Tensor>& page_table,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& s_aux, int64_t seqlen,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    bool rotary_interleaved, int64_t num_splits, bool check_values,
    const std::optional<Tensor>& k_descale, const std::optional<Tensor>& v_descale,
    double k_descale_factor, double v_descale_factor) {
    KvCacheArguments arguments{q,
                               k_cache,
                               v_cache,
                               k,
                               v,
                               rotary_cos,
                               rotary_sin,
                               std::nullopt,
                               std::nullopt,
                               cache_seqlens,
                               cache_batch_idx,
                               cache_leftpad,
                               page_table,
                               alibi_slopes,
                               s_aux,
                               seqlen,
                               softmax_scale,
                               causal,
                               window_left,
                               window_right,
                               softcap,
                               num_splits,
                               check_values,
                               k_descale,
                               v_descale,
                               k_descale_factor,
                               v_descale_factor};
    KvCacheAttentionParams params = fan::check_kvcache(arguments);
    const Place place(q);
    Buffers buffers = allocate_buffers(place, arguments, params);
    append(place, arguments, params, rotary_interleaved);
    return attend(place, arguments, params, buffers);
}
