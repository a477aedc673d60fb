"""Devices, dtypes, shapes and numbers that the norms' ops refuse, for their fakes: a call on "meta"
tensors and a trace end with the errors of a real call."""

import math
from typing import Optional

import torch
from torch import Tensor

from .fake_checks import FLOAT_DTYPES, in_float32, is_known, refuse_other_devices, require


def check_norm_shapes(
    x: Tensor, residual: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor]
) -> None:
    """Raises the op's ValueError for tensors that do not go together."""
    refuse_other_devices("x", x, residual=residual, weight=weight, bias=bias)
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; allowed are torch.float32, torch.float16 and "
                "torch.bfloat16"
            )
    if x.dim() < 1:
        raise ValueError(
            "x has shape (); expected (..., hidden_size) with hidden_size of at least 1"
        )
    require(
        x.shape[-1] >= 1,
        lambda: (
            f"x has shape {tuple(x.shape)}; expected (..., hidden_size) with hidden_size of at "
            "least 1"
        ),
    )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}; expected (hidden_size,), the last "
                f"dimension of x, which has shape {tuple(x.shape)}"
            )
        require(
            parameter.shape[0] == x.shape[-1],
            lambda name=name, parameter=parameter: (
                f"{name} has shape {tuple(parameter.shape)}; expected (hidden_size,) = "
                f"({x.shape[-1]},), the last dimension of x, which has shape {tuple(x.shape)}"
            ),
        )
    if residual is None:
        return
    if residual.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"residual has dtype {residual.dtype} but x has dtype {x.dtype}; allowed are the dtype "
            "of x and torch.float32"
        )
    fits = residual.dim() == x.dim()
    if fits:
        for found, size in zip(residual.shape, x.shape):
            fits = fits & (found == size)
    require(
        fits,
        lambda: (
            f"residual has shape {tuple(residual.shape)} but x has shape {tuple(x.shape)}; both "
            "must be the same"
        ),
    )


def check_norm_scalars(eps: float, weight_offset: float, weight: Optional[Tensor]) -> None:
    """Likewise for numbers outside their range."""
    if is_known(eps) and (eps < 0 or not math.isfinite(in_float32(eps))):
        raise ValueError(f"eps is {eps:g}; it must be finite and not negative")
    if is_known(weight_offset) and not math.isfinite(in_float32(weight_offset)):
        raise ValueError(f"weight_offset is {weight_offset:g}; it must be finite")
    if is_known(weight_offset) and weight is None and weight_offset != 0:
        raise ValueError(
            f"weight_offset is {weight_offset:g} but weight is None; an offset needs a weight to "
            "be added to"
        )
