"""RMSNorm and LayerNorm as models write them, in torch's own operations.

In float64 they are the reference; in a kernel's own dtype they show the rounding that it has to
reproduce and the error from which tolerances are derived.
"""

import torch
from torch import Tensor


def normalize(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalized in float32, rounded to x's dtype, then multiplied with the weight."""
    return weight * normalize(at_least_float32(x), eps).to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """Everything in float32, one rounding at the end."""
    scale = at_least_float32(weight)
    if weight_offset:
        scale = weight_offset + scale
    return (normalize(at_least_float32(x), eps) * scale).to(x.dtype)


def none(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every operation in x's own dtype."""
    return weight * normalize(x, eps)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(
    x,
    weight=None,
    eps=1e-6,
    *,
    residual=None,
    weight_offset=0.0,
    casting_mode="llama",
    residual_in_fp32=False,
) -> tuple[Tensor, Tensor]:
    """``(out, residual_out)``."""
    total = add(x, residual, residual_in_fp32)
    if weight is None:
        weight = torch.ones(x.shape[-1], dtype=total.dtype, device=x.device)
    if casting_mode == "gemma":
        out = gemma(total, weight, eps, weight_offset)
    else:
        formula = {"llama": llama, "none": none}[casting_mode]
        out = formula(total, weight + weight_offset if weight_offset else weight, eps)
    return out.to(x.dtype), total


def layer_norm(
    x, weight=None, bias=None, eps=1e-5, *, residual=None, residual_in_fp32=False
) -> tuple[Tensor, Tensor]:
    """``(out, residual_out)``."""
    total = add(x, residual, residual_in_fp32)
    wide = at_least_float32(total)
    centred = wide - wide.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * at_least_float32(weight)
    if bias is not None:
        out = out + at_least_float32(bias)
    return out.to(x.dtype), total


def add(x, residual, residual_in_fp32) -> Tensor:
    if residual_in_fp32:
        x = at_least_float32(x)
    return x if residual is None else x + residual
