#include "attention_checks.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

#include "attention_index_checks.h"
#include "attention_tensors.h"
#include "tensor_checks.h"

namespace flash_attn_norm {

namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMostHeads = 256;  // that a model is believed to have
constexpr const char* kDenseShape = "(batch_size, seqlen_q, num_heads_q, head_dim)";

struct Shapes {
    bool packed;
    int64_t batch_size, seqlen_q, seqlen_k, total_q, total_k;
    int64_t num_heads_q, num_heads_kv, head_dim, head_dim_v;
};

void check_devices(const AttentionArguments& arguments) {
    const auto check = [&](const char* name, const std::optional<Tensor>& tensor) {
        if (tensor) check_device(name, *tensor, "q", arguments.q);
    };
    check("k", arguments.k);
    check("v", arguments.v);
    check("cu_seqlens_q", arguments.cu_seqlens_q);
    check("cu_seqlens_k", arguments.cu_seqlens_k);
    check("alibi_slopes", arguments.alibi_slopes);
    check("s_aux", arguments.s_aux);
    check("attn_bias", arguments.attn_bias);
    check("rng_state", arguments.rng_state);
}

void check_dtypes(const AttentionArguments& arguments) {
    const ScalarType q = arguments.q.scalar_type();
    const ScalarType k = arguments.k.scalar_type();
    const ScalarType v = arguments.v.scalar_type();
    if (k == ScalarType::Float8_e4m3fn || v == ScalarType::Float8_e4m3fn) {
        refuse(k == ScalarType::Float8_e4m3fn ? "k" : "v",
               " has dtype torch.float8_e4m3fn; float8 keys and values are a cache's: "
               "flash_attn_with_kvcache takes them as "
               "k_cache and v_cache, with k_descale and v_descale, beside q in torch.bfloat16 or "
               "torch.float16");
    }
    if (q != k || q != v) {
        refuse("q, k and v must have one dtype, but q is ", q, ", k is ", k, " and v is ", v,
               "; cast them to one, e.g. q.to(v.dtype) and k.to(v.dtype). Under torch.autocast a "
               "norm or a rotary embedding that returns float32 is the usual cause");
    }
    if (!is_float_dtype(q)) {
        refuse("q, k and v have dtype ", q,
               "; allowed are torch.bfloat16, torch.float16 and, on the CPU, torch.float32");
    }
    if (q == ScalarType::Float && !arguments.q.is_cpu()) {
        refuse("q, k and v are torch.float32 on ", device_text(arguments.q),
               "; attention on a GPU takes torch.bfloat16 or torch.float16: cast them, e.g. "
               "q.to(torch.bfloat16), load the model in torch.bfloat16, or run it under "
               "torch.autocast so that its projections return torch.bfloat16");
    }
}

/// Whether heads seem to come before rows: those of q would divide then, and be fewer than the
/// rows. Where q and k would have equally many, they may as well be short sequences, unless the
/// other reading is absurd.
bool look_transposed(const Tensor& q, const Tensor& k) {
    const int64_t rows_q = q.size(1), rows_k = k.size(1), heads_q = q.size(2), heads_k = k.size(2);
    if (rows_q < 1 || rows_k < 1 || rows_q % rows_k != 0) return false;
    if (std::max(rows_q, rows_k) >= std::max(heads_q, heads_k)) return false;
    return rows_q != rows_k || heads_q < heads_k || heads_q > kMostHeads;
}

/// The sizes that q, k and v agree on.
Shapes check_shapes(const AttentionArguments& arguments) {
    const Tensor &q = arguments.q, &k = arguments.k, &v = arguments.v;
    if (arguments.cu_seqlens_q.has_value() != arguments.cu_seqlens_k.has_value()) {
        refuse(arguments.cu_seqlens_q ? "cu_seqlens_k" : "cu_seqlens_q",
               " is missing; packed attention takes both cu_seqlens_q and cu_seqlens_k");
    }
    const bool packed = arguments.cu_seqlens_q.has_value();
    const int64_t rank = packed ? 3 : 4;
    check_rank("q", q, rank, packed ? "(total_q, num_heads_q, head_dim)" : kDenseShape);
    check_rank("k", k, rank,
               packed ? "(total_k, num_heads_kv, head_dim)"
                      : "(batch_size, seqlen_k, num_heads_kv, head_dim)");
    check_rank("v", v, rank,
               packed ? "(total_k, num_heads_kv, head_dim_v)"
                      : "(batch_size, seqlen_k, num_heads_kv, head_dim_v)");

    if (!packed && (k.size(0) != q.size(0) || v.size(0) != q.size(0))) {
        refuse("q, k and v have batch sizes ", q.size(0), ", ", k.size(0), " and ", v.size(0),
               "; they must be equal");
    }
    const int64_t row_dim = rank - 3, head_dim = rank - 2, last = rank - 1;
    if (k.size(row_dim) != v.size(row_dim)) {
        refuse("k has ", counted(k.size(row_dim), "row"), " and v has ", v.size(row_dim), " (k ",
               shape_text(k), ", v ", shape_text(v), "); they must be equal");
    }
    const int64_t num_heads_q = q.size(head_dim), num_heads_kv = k.size(head_dim);
    if (v.size(head_dim) != num_heads_kv) {
        refuse("k has ", counted(num_heads_kv, "head"), " and v has ", v.size(head_dim),
               "; they must be equal");
    }
    if (num_heads_kv < 1 || num_heads_q < 1 || num_heads_q % num_heads_kv != 0) {
        const bool transposed = !packed && look_transposed(q, k);
        refuse("q has ", counted(num_heads_q, "head"), " and k and v have ", num_heads_kv,
               "; num_heads_q must be a positive multiple of num_heads_kv",
               transposed ? transposed_text("q", q, kDenseShape) + ", and k and v likewise" : "");
    }
    if (num_heads_q > std::numeric_limits<int32_t>::max()) {
        refuse("q has ", num_heads_q, " heads; at most 2147483647 are allowed");
    }
    if (q.size(last) != k.size(last)) {
        refuse("q has head_dim ", q.size(last), " and k has head_dim ", k.size(last),
               "; they must be equal (only v may differ)");
    }
    if (q.size(last) < 1 || q.size(last) > kMaxHeadDim) {
        refuse("q and k have head_dim ", q.size(last), "; allowed are 1 to ", kMaxHeadDim);
    }
    if (v.size(last) < 1 || v.size(last) > kMaxHeadDim) {
        refuse("v has head_dim ", v.size(last), "; allowed are 1 to ", kMaxHeadDim);
    }

    Shapes shapes;
    shapes.packed = packed;
    shapes.batch_size = packed ? 0 : q.size(0);  // of packed tensors: known from cu_seqlens
    shapes.seqlen_q = packed ? 0 : q.size(1);
    shapes.seqlen_k = packed ? 0 : k.size(1);
    shapes.total_q = packed ? q.size(0) : q.size(0) * q.size(1);
    shapes.total_k = packed ? k.size(0) : k.size(0) * k.size(1);
    shapes.num_heads_q = num_heads_q;
    shapes.num_heads_kv = num_heads_kv;
    shapes.head_dim = q.size(last);
    shapes.head_dim_v = v.size(last);
    return shapes;
}

void check_scalars(const AttentionArguments& arguments) {
    check_attention_scalars(arguments.softmax_scale, arguments.window_left, arguments.window_right,
                            arguments.softcap);
    const float dropout_p = static_cast<float>(arguments.dropout_p);
    if (!(dropout_p >= 0.0f && dropout_p < 1.0f)) {
        refuse("dropout_p is ", arguments.dropout_p, "; it must lie in [0, 1)");
    }
    if (arguments.dropout_p > 0.0 && !arguments.rng_state) {
        refuse("rng_state is missing; with dropout_p ", arguments.dropout_p,
               " the op takes the seed and the offset of the mask, torch.int64 of shape (2,)");
    }
}

void check_attn_bias(const Tensor& bias, const Shapes& shapes, ScalarType dtype) {
    if (bias.scalar_type() != dtype && bias.scalar_type() != ScalarType::Float) {
        refuse("attn_bias has dtype ", bias.scalar_type(), "; it must be torch.float32",
               dtype == ScalarType::Float ? std::string(", as q's") : " or q's, " + text(dtype));
    }
    const auto one_or = [&](int64_t dim, int64_t size) {
        return bias.size(dim) == 1 || bias.size(dim) == size;
    };
    if (shapes.packed) {
        check_rank("attn_bias", bias, 3, "(1 or num_heads_q, 1 or total_q, max_seqlen_k)");
        if (one_or(0, shapes.num_heads_q) && one_or(1, shapes.total_q)) return;
        refuse("attn_bias has shape ", shape_text(bias),
               "; it must be (1 or num_heads_q, 1 or total_q, max_seqlen_k) = (1 or ",
               shapes.num_heads_q, ", 1 or ", shapes.total_q, ", max_seqlen_k)");
    }
    check_rank("attn_bias", bias, 4,
               "(1 or batch_size, 1 or num_heads_q, 1 or seqlen_q, seqlen_k)");
    if (one_or(0, shapes.batch_size) && one_or(1, shapes.num_heads_q) &&
        one_or(2, shapes.seqlen_q) && bias.size(3) == shapes.seqlen_k) {
        return;
    }
    refuse("attn_bias has shape ", shape_text(bias),
           "; it must be (1 or batch_size, 1 or num_heads_q, 1 or seqlen_q, seqlen_k) = (1 or ",
           shapes.batch_size, ", 1 or ", shapes.num_heads_q, ", 1 or ", shapes.seqlen_q, ", ",
           shapes.seqlen_k, ")");
}

void check_rng_state(const Tensor& rng_state) {
    if (rng_state.scalar_type() != ScalarType::Long || rng_state.dim() != 1 ||
        rng_state.size(0) != 2 || !rng_state.is_contiguous()) {
        refuse("rng_state has dtype ", rng_state.scalar_type(), " and shape ",
               shape_text(rng_state), "; it must be torch.int64 of shape (2,), contiguous");
    }
}

/// A window bound that no pair of row and key can reach is no bound. Never cut to the key count:
/// with more queries than keys the distance between a row and a key exceeds it.
int64_t reachable_window(int64_t bound, const Shapes& shapes) {
    return bound >= shapes.total_q + shapes.total_k ? -1 : bound;
}

void describe_extras(AttentionArguments& arguments, const Shapes& shapes,
                     AttentionProblem& problem) {
    describe_head_terms(arguments.alibi_slopes, arguments.s_aux, problem);
    if (arguments.attn_bias) {
        Tensor& bias = *arguments.attn_bias;
        bias = with_copyable_rows(with_unit_last_stride(bias));
        const auto stride = [&](int64_t dim) { return bias.size(dim) == 1 ? 0 : bias.stride(dim); };
        problem.attn_bias = bias.const_data_ptr();
        problem.attn_bias_dtype = to_dtype("attn_bias", bias);
        problem.bias_columns = bias.size(bias.dim() - 1);
        const int64_t head = shapes.packed ? 0 : 1;
        problem.attn_bias_strides.batch = shapes.packed ? 0 : stride(0);
        problem.attn_bias_strides.head = stride(head);
        problem.attn_bias_strides.row = stride(head + 1);
    }
    if (arguments.rng_state && arguments.dropout_p > 0.0) {
        problem.rng_state = static_cast<const int64_t*>(arguments.rng_state->const_data_ptr());
    }
}

/// FLASH_ATTN_NORM_PORTABLE=1 in the environment: a diagnosis that compares a card's own kernels
/// with the portable ones. Read on every call, so that a process can do both.
bool portable_kernels_are_forced() {
    const char* value = std::getenv("FLASH_ATTN_NORM_PORTABLE");
    return value != nullptr && std::string(value) == "1";
}

AttentionProblem describe(AttentionArguments& arguments, const Shapes& shapes) {
    AttentionProblem problem;
    problem.dtype = to_dtype("q", arguments.q);
    problem.batch_size = shapes.batch_size;
    problem.seqlen_q = shapes.seqlen_q;
    problem.seqlen_k = shapes.seqlen_k;
    problem.total_q = shapes.total_q;
    problem.total_k = shapes.total_k;
    problem.num_heads_q = static_cast<int>(shapes.num_heads_q);
    problem.num_heads_kv = static_cast<int>(shapes.num_heads_kv);
    problem.head_dim = static_cast<int>(shapes.head_dim);
    problem.head_dim_v = static_cast<int>(shapes.head_dim_v);
    if (shapes.packed) {
        problem.cu_seqlens_q =
            static_cast<const int32_t*>(arguments.cu_seqlens_q->const_data_ptr());
        problem.cu_seqlens_k =
            static_cast<const int32_t*>(arguments.cu_seqlens_k->const_data_ptr());
    }
    problem.softmax_scale = static_cast<float>(arguments.softmax_scale);
    problem.force_portable = portable_kernels_are_forced();
    problem.softcap = static_cast<float>(arguments.softcap);
    problem.window_left = reachable_window(arguments.window_left, shapes);
    problem.window_right = arguments.causal ? 0 : reachable_window(arguments.window_right, shapes);
    problem.dropout_p = static_cast<float>(arguments.dropout_p);
    describe_extras(arguments, shapes, problem);
    return problem;
}

}  // namespace

void check_attention_scalars(double softmax_scale, int64_t window_left, int64_t window_right,
                             double softcap) {
    // As the kernels see them: a number that leaves float32's range becomes infinite or zero there.
    const float scale_in_kernel = static_cast<float>(softmax_scale);
    const float softcap_in_kernel = static_cast<float>(softcap);
    if (!std::isfinite(scale_in_kernel)) {
        refuse("softmax_scale is ", softmax_scale, "; it must be a finite number");
    }
    if (window_left < -1 || window_right < -1) {
        refuse("window_size is (", window_left, ", ", window_right,
               "); an entry must be -1 (no bound) or at least 0");
    }
    if (!std::isfinite(softcap_in_kernel) || !(softcap_in_kernel > 0.0f || softcap == 0.0)) {
        refuse("softcap is ", softcap, "; it must be 0 (off) or a positive finite number");
    }
}

void check_alibi_slopes(const Tensor& slopes, int64_t num_heads_q, int64_t batch_size) {
    if (slopes.scalar_type() != ScalarType::Float) {
        refuse("alibi_slopes has dtype ", slopes.scalar_type(), "; it must be torch.float32");
    }
    const bool per_head = slopes.dim() == 1 && slopes.size(0) == num_heads_q;
    const bool per_batch =
        slopes.dim() == 2 && slopes.size(0) == batch_size && slopes.size(1) == num_heads_q;
    if (!per_head && !per_batch) {
        refuse("alibi_slopes has shape ", shape_text(slopes), "; allowed are (num_heads_q,) = (",
               num_heads_q, ",) and (batch_size, num_heads_q) = (", batch_size, ", ", num_heads_q,
               ")");
    }
}

void check_s_aux(const Tensor& s_aux, int64_t num_heads_q) {
    to_dtype("s_aux", s_aux);
    if (s_aux.dim() != 1 || s_aux.size(0) != num_heads_q) {
        refuse("s_aux has shape ", shape_text(s_aux), "; it must be (num_heads_q,) = (",
               num_heads_q, ",)");
    }
}

void describe_head_terms(std::optional<Tensor>& alibi_slopes, std::optional<Tensor>& s_aux,
                         AttentionProblem& problem) {
    if (alibi_slopes) {
        *alibi_slopes = with_unit_last_stride(*alibi_slopes);
        problem.alibi_slopes = static_cast<const float*>(alibi_slopes->const_data_ptr());
        problem.alibi_batch_stride = alibi_slopes->dim() == 2 ? alibi_slopes->stride(0) : 0;
    }
    if (s_aux) {
        *s_aux = with_unit_last_stride(*s_aux);
        problem.s_aux = s_aux->const_data_ptr();
        problem.s_aux_dtype = to_dtype("s_aux", *s_aux);
    }
}

AttentionProblem check_attention(AttentionArguments& arguments) {
    check_devices(arguments);
    check_dtypes(arguments);
    Shapes shapes = check_shapes(arguments);
    check_scalars(arguments);
    if (shapes.packed) {
        check_index_tensors(arguments);
        shapes.batch_size = arguments.cu_seqlens_q->size(0) - 1;
    }
    if (arguments.alibi_slopes)
        check_alibi_slopes(*arguments.alibi_slopes, shapes.num_heads_q, shapes.batch_size);
    if (arguments.s_aux) check_s_aux(*arguments.s_aux, shapes.num_heads_q);
    if (arguments.attn_bias) {
        check_attn_bias(*arguments.attn_bias, shapes, arguments.q.scalar_type());
    }
    if (arguments.rng_state) check_rng_state(*arguments.rng_state);
    if (shapes.packed) check_index_values(arguments, shapes.total_q, shapes.total_k);

    arguments.q = with_unit_last_stride(arguments.q);
    arguments.k = with_unit_last_stride(arguments.k);
    arguments.v = with_unit_last_stride(arguments.v);
    return describe(arguments, shapes);
}

void check_attention_gradients(const AttentionProblem& problem, const AttentionArguments& arguments,
                               const Tensor& out, const Tensor& softmax_lse,
                               const std::optional<Tensor>& dout,
                               const std::optional<Tensor>& dsoftmax_lse) {
    const Tensor& q = arguments.q;
    const auto check_like_out = [&](const char* name, const Tensor& tensor) {
        check_device(name, tensor, "q", q);
        bool same = tensor.dim() == q.dim() && tensor.scalar_type() == q.scalar_type();
        for (int64_t dim = 0; same && dim + 1 < q.dim(); ++dim) {
            same = tensor.size(dim) == q.size(dim);
        }
        if (same && tensor.size(q.dim() - 1) == problem.head_dim_v) return;
        refuse(name, " has shape ", shape_text(tensor), " and dtype ", tensor.scalar_type(),
               "; it must have q's shape ", shape_text(q), " with v's head_dim ",
               problem.head_dim_v, ", and q's dtype ", q.scalar_type());
    };
    const auto check_like_lse = [&](const char* name, const Tensor& tensor) {
        check_device(name, tensor, "q", q);
        const bool same =
            tensor.scalar_type() == ScalarType::Float &&
            (problem.is_packed()
                 ? tensor.dim() == 2 && tensor.size(0) == problem.num_heads_q &&
                       tensor.size(1) == problem.total_q
                 : tensor.dim() == 3 && tensor.size(0) == problem.batch_size &&
                       tensor.size(1) == problem.num_heads_q && tensor.size(2) == problem.seqlen_q);
        if (same) return;
        refuse(
            name, " has shape ", shape_text(tensor), " and dtype ", tensor.scalar_type(),
            "; it must be torch.float32 of shape ",
            problem.is_packed() ? "(num_heads_q, total_q)" : "(batch_size, num_heads_q, seqlen_q)",
            " as the forward pass returned it");
    };
    check_like_out("out", out);
    check_like_lse("softmax_lse", softmax_lse);
    if (dout) check_like_out("dout", *dout);
    if (dsoftmax_lse) check_like_lse("dsoftmax_lse", *dsoftmax_lse);
}

}  // namespace flash_attn_norm
