#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "allocation.h"
#include "cpu_threads.h"
#include "norms/norms.h"
#include "tensor_checks.h"
#include "torch_binding.h"

#if defined(CUDA_KERNEL)
#include "device.h"
#endif

namespace fan = flash_attn_norm;

namespace {

using fan::CastingMode;
using fan::DType;
using fan::NormBwdParams;
using fan::NormFwdParams;
using fan::NormProblem;
using fan::RowShape;
using fan::RowStrides;
using torch::headeronly::ScalarType;

// ---- refusals ----

void check_input(const char* name, const Tensor& x) {
    fan::to_dtype(name, x);
    if (x.dim() < 1 || x.size(x.dim() - 1) < 1) {
        fan::refuse(name, " has shape ", fan::shape_text(x),
                    "; expected (..., hidden_size) with hidden_size of at least 1");
    }
}

/// weight and bias: (hidden_size,), any of the three dtypes.
void check_parameter(const char* name, const Tensor& parameter, const Tensor& x) {
    fan::to_dtype(name, parameter);
    fan::check_device(name, parameter, "x", x);
    const int64_t hidden_size = x.size(x.dim() - 1);
    if (parameter.dim() != 1 || parameter.size(0) != hidden_size) {
        fan::refuse(name, " has shape ", fan::shape_text(parameter),
                    "; expected (hidden_size,) = (", hidden_size,
                    ",), the last dimension of x, which has shape ", fan::shape_text(x));
    }
}

void check_same_shape(const char* name, const Tensor& tensor, const char* reference_name,
                      const Tensor& reference) {
    fan::check_device(name, tensor, reference_name, reference);
    bool same = tensor.dim() == reference.dim();
    for (int64_t dim = 0; same && dim < tensor.dim(); ++dim) {
        same = tensor.size(dim) == reference.size(dim);
    }
    if (same) return;
    fan::refuse(name, " has shape ", fan::shape_text(tensor), " but ", reference_name,
                " has shape ", fan::shape_text(reference), "; both must be the same");
}

void check_dtype_is(const char* name, const Tensor& tensor, ScalarType dtype, const char* why) {
    if (tensor.scalar_type() == dtype) return;
    fan::refuse(name, " has dtype ", tensor.scalar_type(), "; expected ", dtype, ", ", why);
}

void check_residual(const Tensor& residual, const Tensor& x) {
    fan::to_dtype("residual", residual);
    check_same_shape("residual", residual, "x", x);
    const ScalarType dtype = residual.scalar_type();
    if (dtype == x.scalar_type() || dtype == ScalarType::Float) return;
    fan::refuse("residual has dtype ", dtype, " but x has dtype ", x.scalar_type(),
                "; allowed are the dtype of x and torch.float32");
}

CastingMode check_casting_mode(int64_t casting_mode) {
    if (casting_mode < 0 || casting_mode > 2) {
        fan::refuse("casting_mode is ", casting_mode,
                    "; allowed are 0 (llama), 1 (gemma) and 2 (none)");
    }
    return static_cast<CastingMode>(casting_mode);
}

// ---- rows ----

/// A tensor of rows that are addressed through RowStrides.
struct RowTensor {
    Tensor tensor;
    RowStrides* strides;
};

/// Merges the leading dimensions that every tensor steps through evenly. False if a RowShape cannot
/// hold what is left.
bool merge_row_dims(const std::vector<RowTensor>& tensors, RowShape& shape) {
    const Tensor& first = tensors.front().tensor;
    shape.num_rows = 1;
    shape.num_dims = 0;
    for (int64_t dim = 0; dim + 1 < first.dim(); ++dim) {
        const int64_t size = first.size(dim);
        shape.num_rows *= size;
        if (size == 1) continue;
        const int last = shape.num_dims - 1;
        bool merges = last >= 0;
        for (const RowTensor& rows : tensors) {
            merges = merges && rows.strides->dims[last] == size * rows.tensor.stride(dim);
        }
        if (!merges && shape.num_dims == fan::kMaxRowDims) return false;
        const int target = merges ? last : shape.num_dims++;
        shape.sizes[target] = merges ? shape.sizes[target] * size : size;
        for (const RowTensor& rows : tensors) {
            rows.strides->dims[target] = rows.tensor.stride(dim);
        }
    }
    if (shape.num_dims == 0) {  // one row
        shape.num_dims = 1;
        shape.sizes[0] = 1;
    }
    return shape.num_dims == 1 || shape.num_rows < (int64_t{1} << 31);
}

/// Fills the shape and each tensor's strides. Copies a tensor only if its last dimension is not
/// contiguous or its leading dimensions are too scattered.
RowShape address_rows(std::vector<RowTensor>& tensors) {
    RowShape shape;
    for (RowTensor& rows : tensors) rows.tensor = fan::with_unit_last_stride(rows.tensor);
    if (merge_row_dims(tensors, shape)) return shape;
    for (RowTensor& rows : tensors) rows.tensor = torch::stable::contiguous(rows.tensor);
    merge_row_dims(tensors, shape);
    return shape;
}

// ---- allocation ----

std::vector<int64_t> shape_of(const Tensor& tensor) {
    return std::vector<int64_t>(tensor.sizes().begin(), tensor.sizes().end());
}

Tensor empty_tensor(const Tensor& reference, ScalarType dtype) {
    return fan::empty_like_device(reference, std::vector<int64_t>{0}, dtype);
}

/// (*rows) for RMSNorm: rstd. (2, *rows) for LayerNorm: rstd and mean.
std::vector<int64_t> stats_shape(const Tensor& x, bool is_layer_norm) {
    std::vector<int64_t> shape = shape_of(x);
    shape.pop_back();
    if (is_layer_norm) shape.insert(shape.begin(), 2);
    return shape;
}

Tensor empty_workspace(const Tensor& x, int64_t bytes) {
    return fan::empty_like_device(x, std::vector<int64_t>{bytes}, ScalarType::Byte);
}

void run(const Tensor& x, NormFwdParams& params) {
#if defined(CUDA_KERNEL)
    if (!x.is_cpu()) {
        const fan::CudaContext context(x);
        fan::cuda::norm_fwd(params, context.stream());
        return;
    }
#endif
    const Tensor workspace = empty_workspace(x, fan::cpu::norm_fwd_workspace_bytes(params));
    params.workspace = workspace.mutable_data_ptr();
    fan::cpu::norm_fwd(params, fan::torch_cpu_runtime());
}

void run(const Tensor& x, NormBwdParams& params) {
#if defined(CUDA_KERNEL)
    if (!x.is_cpu()) {
        const fan::CudaContext context(x);
        Tensor workspace;
        const auto allocate = [&](int64_t bytes) {
            workspace = empty_workspace(x, bytes);
            return workspace.mutable_data_ptr();
        };
        fan::cuda::norm_bwd(params, allocate, context.stream());
        return;
    }
#endif
    const Tensor workspace = empty_workspace(x, fan::cpu::norm_bwd_workspace_bytes(params));
    params.workspace = workspace.mutable_data_ptr();
    fan::cpu::norm_bwd(params, fan::torch_cpu_runtime());
}

// ---- parameter structs ----

/// What both passes share, but for the rows, sum_dtype and eps. x may be any tensor like it.
NormProblem make_problem(const Tensor& x, const std::optional<Tensor>& weight, double weight_offset,
                         int64_t casting_mode, bool is_layer_norm) {
    NormProblem problem;
    problem.casting_mode = check_casting_mode(casting_mode);
    problem.hidden_size = x.size(x.dim() - 1);
    problem.inv_hidden_size = 1.0f / static_cast<float>(problem.hidden_size);
    problem.x_dtype = fan::to_dtype("x", x);
    problem.is_layer_norm = is_layer_norm;
    if (!std::isfinite(static_cast<float>(weight_offset))) {
        fan::refuse("weight_offset is ", weight_offset, "; it must be finite");
    }
    if (weight) {
        check_parameter("weight", *weight, x);
        problem.weight_dtype = fan::to_dtype("weight", *weight);
        problem.weight_offset = static_cast<float>(weight_offset);
    } else if (weight_offset != 0.0) {
        fan::refuse("weight_offset is ", weight_offset,
                    " but weight is None; an offset needs a weight to be added to");
    }
    return problem;
}

const void* data_of(const std::optional<Tensor>& tensor) {
    return tensor ? tensor->const_data_ptr() : nullptr;
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
    if (!tensor) return std::nullopt;
    return torch::stable::contiguous(*tensor);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> norm_fwd(const Tensor& x, const std::optional<Tensor>& residual,
                                            const std::optional<Tensor>& weight,
                                            const std::optional<Tensor>& bias, double eps,
                                            double weight_offset, int64_t casting_mode,
                                            bool is_layer_norm, bool residual_in_fp32,
                                            bool needs_residual_out) {
    check_input("x", x);
    if (!std::isfinite(static_cast<float>(eps)) || eps < 0.0) {
        fan::refuse("eps is ", eps, "; it must be finite and not negative");
    }
    NormFwdParams params;
    NormProblem& problem = params.problem;
    problem = make_problem(x, weight, weight_offset, casting_mode, is_layer_norm);
    problem.eps = static_cast<float>(eps);
    problem.sum_dtype = residual_in_fp32 ? DType::kFloat32 : problem.x_dtype;
    params.residual_dtype = problem.x_dtype;
    if (residual) {
        check_residual(*residual, x);
        params.residual_dtype = fan::to_dtype("residual", *residual);
        if (params.residual_dtype == DType::kFloat32) problem.sum_dtype = DType::kFloat32;
    }
    if (bias) {
        check_parameter("bias", *bias, x);
        params.bias_dtype = fan::to_dtype("bias", *bias);
    }

    std::vector<RowTensor> rows = {{x, &params.x_strides}};
    if (residual) rows.push_back({*residual, &params.residual_strides});
    problem.rows = address_rows(rows);
    params.x = rows[0].tensor.const_data_ptr();
    if (residual) params.residual = rows[1].tensor.const_data_ptr();
    const std::optional<Tensor> kernel_weight = contiguous(weight);
    const std::optional<Tensor> kernel_bias = contiguous(bias);
    problem.weight = data_of(kernel_weight);
    params.bias = data_of(kernel_bias);

    const ScalarType sum_dtype =
        problem.sum_dtype == DType::kFloat32 ? ScalarType::Float : x.scalar_type();
    Tensor out = fan::empty_like_device(x, shape_of(x), x.scalar_type());
    Tensor residual_out = needs_residual_out ? fan::empty_like_device(x, shape_of(x), sum_dtype)
                                             : empty_tensor(x, sum_dtype);
    Tensor stats = fan::empty_like_device(x, stats_shape(x, is_layer_norm), ScalarType::Float);
    if (problem.rows.num_rows == 0) return {out, residual_out, stats};
    params.out = out.mutable_data_ptr();
    if (needs_residual_out) params.residual_out = residual_out.mutable_data_ptr();
    params.rstd = static_cast<float*>(stats.mutable_data_ptr());
    if (is_layer_norm) params.mean = params.rstd + problem.rows.num_rows;
    run(x, params);
    return {out, residual_out, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_bwd(
    const Tensor& dout, const std::optional<Tensor>& dresidual_out, const Tensor& sum,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& stats,
    double weight_offset, int64_t casting_mode, bool is_layer_norm, bool needs_dresidual,
    bool needs_dweight, bool needs_dbias) {
    check_input("sum", sum);
    check_same_shape("dout", dout, "sum", sum);
    NormBwdParams params;
    NormProblem& problem = params.problem;
    problem = make_problem(dout, weight, weight_offset, casting_mode, is_layer_norm);
    problem.sum_dtype = fan::to_dtype("sum", sum);
    if (problem.sum_dtype != DType::kFloat32) {
        check_dtype_is("dout", dout, sum.scalar_type(), "the dtype of sum");
    }
    if (dresidual_out) {
        check_same_shape("dresidual_out", *dresidual_out, "sum", sum);
        check_dtype_is("dresidual_out", *dresidual_out, sum.scalar_type(), "the dtype of sum");
    }
    const std::vector<int64_t> expected_stats = stats_shape(sum, is_layer_norm);
    fan::check_device("stats", stats, "sum", sum);
    check_dtype_is("stats", stats, ScalarType::Float, "as norm_fwd gives it");
    if (shape_of(stats) != expected_stats) {
        fan::refuse("stats has shape ", fan::shape_text(stats), ", which does not fit sum with ",
                    fan::shape_text(sum));
    }

    std::vector<RowTensor> rows = {{dout, &params.dout_strides}, {sum, &params.sum_strides}};
    if (dresidual_out) rows.push_back({*dresidual_out, &params.dresidual_out_strides});
    problem.rows = address_rows(rows);
    params.dout = rows[0].tensor.const_data_ptr();
    params.sum = rows[1].tensor.const_data_ptr();
    if (dresidual_out) params.dresidual_out = rows[2].tensor.const_data_ptr();
    const Tensor kernel_stats = torch::stable::contiguous(stats);
    params.rstd = static_cast<const float*>(kernel_stats.const_data_ptr());
    if (is_layer_norm) params.mean = params.rstd + problem.rows.num_rows;
    const std::optional<Tensor> kernel_weight = contiguous(weight);
    problem.weight = data_of(kernel_weight);

    const std::vector<int64_t> shape = shape_of(sum);
    const std::vector<int64_t> parameter_shape = {problem.hidden_size};
    Tensor dx = fan::empty_like_device(dout, shape, dout.scalar_type());
    params.dx = dx.mutable_data_ptr();
    Tensor dresidual = empty_tensor(dout, ScalarType::Float);
    if (needs_dresidual) {
        dresidual = fan::empty_like_device(dout, shape, ScalarType::Float);
        params.dresidual = static_cast<float*>(dresidual.mutable_data_ptr());
    }
    Tensor dweight = empty_tensor(dout, weight ? weight->scalar_type() : dout.scalar_type());
    if (needs_dweight && weight) {
        dweight = fan::empty_like_device(dout, parameter_shape, weight->scalar_type());
        params.dweight = dweight.mutable_data_ptr();
    }
    Tensor dbias = empty_tensor(dout, bias ? bias->scalar_type() : dout.scalar_type());
    if (needs_dbias && bias) {
        check_parameter("bias", *bias, sum);
        dbias = fan::empty_like_device(dout, parameter_shape, bias->scalar_type());
        params.dbias = dbias.mutable_data_ptr();
        params.dbias_dtype = fan::to_dtype("bias", *bias);
    }
    run(dout, params);
    return {dx, dresidual, dweight, dbias};
}
