"""RMSNorm and LayerNorm over the last dimension, with an optional fused residual addition."""

from typing import Optional, Union

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from .arguments import (
    check_flag,
    check_number,
    check_optional_tensor,
    check_tensor,
    refuse_forward_mode,
)
from .calls import differentiable, records_gradient, save_nothing
from .norms_shapes import check_norm_scalars, check_norm_shapes

# As csrc/norms/params.h numbers them.
_CASTING_MODES = {"llama": 0, "gemma": 1, "none": 2}

# What LayerNorm computes in: everything in float32, rounded once.
_LAYER_NORM_CASTING_MODE = _CASTING_MODES["gemma"]


def rms_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    residual: Optional[Tensor] = None,
    weight_offset: float = 0.0,
    casting_mode: str = "llama",
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Root mean square normalization over the last dimension, differentiable.

    ``out = s * rsqrt(mean(s ** 2) + eps) * (weight + weight_offset)`` with ``s = x + residual``,
    or ``s = x`` without a residual (Zhang and Sennrich, "Root Mean Square Layer Normalization",
    2019). The mean, eps and the reciprocal root are float32.

    Args:
        x: (..., hidden_size), float32, float16 or bfloat16, any strides. Tensors whose last
            dimension is contiguous are read in place.
        weight: (hidden_size,), any of the three dtypes, also another one than x's. None: ones.
        eps: added to the mean square; finite, not negative. Applied in float32, whatever x's dtype.
        residual: like x, in its dtype or in float32. Added to x before the normalization.
        weight_offset: added to the weight: 1.0 for weights that are stored around zero.
        casting_mode: what is rounded to the dtype of ``s``, and when. "llama": the normalized
            value, before it is multiplied with the weight. "gemma": nothing before the end. "none":
            every step, as a formula in that dtype does. Each is bit-equal to the formula of the
            models that it is named for, given the same mean square.
        prenorm: return ``s`` too, for the next residual addition.
        residual_in_fp32: keep ``s`` in float32. It is float32 in any case if the residual is.

    Returns:
        ``out``, shape and dtype of x, contiguous; with prenorm ``(out, residual_out)``, where
        residual_out is ``s``: x itself if there is nothing to add or to convert.

    Raises:
        ValueError: for a shape, dtype, device, eps or casting_mode other than said here.
        NotImplementedError: on differentiating a gradient once more, or in forward mode.
    """
    if not isinstance(casting_mode, str) or casting_mode not in _CASTING_MODES:
        raise ValueError(
            f"casting_mode is {casting_mode!r}; allowed are 'llama', 'gemma' and 'none'"
        )
    return _norm(
        x,
        residual,
        weight,
        None,
        eps,
        weight_offset,
        _CASTING_MODES[casting_mode],
        False,
        prenorm,
        residual_in_fp32,
    )


def layer_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    *,
    residual: Optional[Tensor] = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Layer normalization over the last dimension, differentiable.

    ``out = (s - mean(s)) * rsqrt(var(s) + eps) * weight + bias`` with ``s = x + residual``, or
    ``s = x`` without a residual, and the biased variance (Ba et al., "Layer Normalization", 2016).
    Computed in float32 and rounded once; the variance is the mean of squared deviations, which
    holds for rows with a large mean.

    Args:
        x: (..., hidden_size), float32, float16 or bfloat16, any strides. Tensors whose last
            dimension is contiguous are read in place.
        weight: (hidden_size,), any of the three dtypes, also another one than x's. None: ones.
        bias: (hidden_size,), any of the three dtypes. None: zeros.
        eps: added to the variance; finite, not negative.
        residual: like x, in its dtype or in float32. Added to x before the normalization.
        prenorm: return ``s`` too, for the next residual addition.
        residual_in_fp32: keep ``s`` in float32. It is float32 in any case if the residual is.

    Returns:
        ``out``, shape and dtype of x, contiguous; with prenorm ``(out, residual_out)``, where
        residual_out is ``s``: x itself if there is nothing to add or to convert.

    Raises:
        ValueError: for a shape, dtype, device or eps other than said here.
        NotImplementedError: on differentiating a gradient once more, or in forward mode.
    """
    return _norm(
        x,
        residual,
        weight,
        bias,
        eps,
        0.0,
        _LAYER_NORM_CASTING_MODE,
        True,
        prenorm,
        residual_in_fp32,
    )


def _norm(
    x,
    residual,
    weight,
    bias,
    eps,
    weight_offset,
    casting_mode,
    is_layer_norm,
    prenorm,
    residual_in_fp32,
):
    _refuse_dtensor(x=x, residual=residual, weight=weight, bias=bias)
    check_tensor("x", x)
    check_optional_tensor("residual", residual)
    check_optional_tensor("weight", weight)
    check_optional_tensor("bias", bias)
    refuse_forward_mode("the norm", x=x, residual=residual, weight=weight, bias=bias)
    eps = check_number("eps", eps)
    weight_offset = check_number("weight_offset", weight_offset)
    prenorm = check_flag("prenorm", prenorm)
    residual_in_fp32 = check_flag("residual_in_fp32", residual_in_fp32)
    # Where the sum is x itself, no second copy of it is written.
    has_sum = residual is not None or (residual_in_fp32 and x.dtype != torch.float32)
    # The backward pass reads the sum; one that no gradient needs is not stored.
    needs_residual_out = has_sum and (prenorm or records_gradient((x, residual, weight, bias)))
    out, residual_out, _ = _forward(
        x,
        residual,
        weight,
        bias,
        eps,
        weight_offset,
        casting_mode,
        is_layer_norm,
        residual_in_fp32,
        needs_residual_out,
    )
    if not prenorm:
        return out
    return out, (residual_out if has_sum else x)


def _refuse_dtensor(**tensors: Optional[Tensor]) -> None:
    # By name: importing torch.distributed.tensor takes a second.
    for name, tensor in tensors.items():
        if type(tensor).__name__ == "DTensor":
            raise ValueError(
                f"{name} is a DTensor; the norms take plain tensors: {name}.to_local() where the "
                f"last dimension is not sharded, {name}.full_tensor() otherwise"
            )


@torch.library.register_fake(add_op_namespace_prefix("norm_fwd"))
def _norm_fwd_fake(
    x,
    residual,
    weight,
    bias,
    eps,
    weight_offset,
    casting_mode,
    is_layer_norm,
    residual_in_fp32,
    needs_residual_out,
):
    check_norm_shapes(x, residual, weight, bias)
    check_norm_scalars(eps, weight_offset, weight)
    is_fp32 = residual_in_fp32 or (residual is not None and residual.dtype == torch.float32)
    sum_dtype = torch.float32 if is_fp32 else x.dtype
    rows = x.shape[:-1]
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape if needs_residual_out else (0,), dtype=sum_dtype),
        x.new_empty((2, *rows) if is_layer_norm else rows, dtype=torch.float32),
    )


@torch.library.register_fake(add_op_namespace_prefix("norm_bwd"))
def _norm_bwd_fake(
    dout,
    dresidual_out,
    sum,
    weight,
    bias,
    stats,
    weight_offset,
    casting_mode,
    is_layer_norm,
    needs_dresidual,
    needs_dweight,
    needs_dbias,
):
    def gradient(parameter, wanted):
        if parameter is None:
            return dout.new_empty((0,))
        return parameter.new_empty(parameter.shape if wanted else (0,))

    return (
        dout.new_empty(dout.shape),
        dout.new_empty(dout.shape if needs_dresidual else (0,), dtype=torch.float32),
        gradient(weight, needs_dweight),
        gradient(bias, needs_dbias),
    )


def _setup_context(ctx, inputs, output):
    (
        x,
        residual,
        weight,
        bias,
        _eps,
        ctx.weight_offset,
        ctx.casting_mode,
        ctx.is_layer_norm,
        _residual_in_fp32,
        needs_residual_out,
    ) = inputs
    _out, residual_out, stats = output
    ctx.set_materialize_grads(False)  # an unused residual_out has no gradient, not a zero one
    # An empty residual_out, too: a gradient of its shape fits nothing.
    ctx.mark_non_differentiable(stats, *(() if needs_residual_out else (residual_out,)))
    ctx.x_dtype = x.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.has_residual_out = needs_residual_out
    ctx.sum_dtype = residual_out.dtype
    # The residual: inside of a compiled vmap nothing said that the sum would be needed.
    sum_or_terms = (residual_out, None) if needs_residual_out else (x, residual)
    ctx.save_for_backward(*sum_or_terms, weight, bias, stats)


def _backward(ctx, dout, dresidual_out, _dstats):
    no_gradients = (None,) * 6  # for what is no tensor
    if not ctx.has_residual_out:
        dresidual_out = None  # torch.compile makes one up for the empty tensor
    _, needs_dresidual, needs_dweight, needs_dbias = ctx.needs_input_grad[:4]
    if dout is None:
        dx = None if dresidual_out is None else dresidual_out.to(ctx.x_dtype)
        dresidual = None
        if needs_dresidual and dresidual_out is not None:
            dresidual = dresidual_out.to(ctx.residual_dtype)
        return (dx, dresidual, None, None, *no_gradients)
    total, residual, weight, bias, stats = ctx.saved_tensors
    if not ctx.has_residual_out:
        total = total.to(ctx.sum_dtype)
    if residual is not None:
        total = total + residual  # rounded as the forward pass has it
    # The residual's gradient is x's, but for the dtype that it is rounded to.
    needs_own_dresidual = needs_dresidual and ctx.residual_dtype != ctx.x_dtype
    dx, dresidual, dweight, dbias = _gradients(
        dout,
        dresidual_out,
        total,
        weight,
        bias,
        stats,
        ctx.weight_offset,
        ctx.casting_mode,
        ctx.is_layer_norm,
        needs_own_dresidual,
        needs_dweight,
        needs_dbias,
    )
    if needs_dresidual and not needs_own_dresidual:
        dresidual = dx
    return (
        dx,
        dresidual if needs_dresidual else None,
        dweight if needs_dweight else None,
        dbias if needs_dbias else None,
        *no_gradients,
    )


def _refuse_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "the norms have no second derivative: their gradients were differentiated once more, as "
        "create_graph=True or a gradient penalty asks for; compute that part with "
        "torch.nn.functional.rms_norm or layer_norm"
    )


torch.library.register_autograd(
    add_op_namespace_prefix("norm_fwd"), _backward, setup_context=_setup_context
)
torch.library.register_autograd(add_op_namespace_prefix("norm_bwd"), _refuse_second_derivative)

_forward = differentiable(ops.norm_fwd, _setup_context, _backward)
_gradients = differentiable(ops.norm_bwd, save_nothing, _refuse_second_derivative)
