"""Checks of what the ops' schemas would refuse less readably, or accept and silently drop: types,
layouts and derivatives that a call cannot follow. Shapes, dtypes and ranges are the ops' matter."""

import math
import numbers
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

_INT64_MAX = 2**63 - 1


def check_tensor(name: str, value: Any) -> None:
    """Refuses what is no dense tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {_text(value)}; it must be a torch.Tensor{by_name(value)}")
    if value.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; pass its values packed, nested.values(), with cu_seqlens "
            "where the function takes them"
        )
    if value.layout is not torch.strided:
        raise ValueError(
            f"{name} has layout {value.layout}; it must be torch.strided, e.g. {name}.to_dense()"
        )
    if value.is_quantized:
        raise ValueError(f"{name} is quantized, {value.dtype}; pass {name}.dequantize()")


def check_optional_tensor(name: str, value: Any) -> None:
    """``check_tensor``, but None is fine."""
    if value is not None:
        check_tensor(name, value)


def check_number(name: str, value: Any) -> float:
    """The number; a tensor without dimensions counts as one if reading it loses nothing, and a bool
    does not: it is a flag that stands in another argument's place. An int that a float cannot hold
    becomes infinite."""
    kind = type(value)
    if kind is float or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if kind is int:
        if -_INT64_MAX <= value <= _INT64_MAX:
            return value
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, Tensor):
        _check_scalar_tensor(name, value, "a number")
        return value.item()
    if isinstance(value, numbers.Real) and kind is not bool:  # NumPy's scalars
        return float(value)
    raise ValueError(f"{name} is {_text(value)}; it must be a number{by_name(value)}")


def check_dropout_p(value: Any) -> float:
    """``check_number``; of None, and of a tensor with dimensions, it says which argument stands in
    this one's place."""
    if value is None:
        raise ValueError(
            "dropout_p is None; it must be a number. torch's scaled_dot_product_attention has its "
            "attn_mask at this place, which is attn_bias=... here; pass arguments by name"
        )
    if isinstance(value, Tensor) and value.dim() > 0:
        takes_lengths = value.dim() == 1 and not value.is_floating_point()
        looks_like = (
            "cu_seqlens, which flash_attn_varlen_func takes"
            if takes_lengths
            else "a mask or a bias, which torch's scaled_dot_product_attention takes at this place "
            "and attn_bias=... here"
        )
        raise ValueError(
            f"dropout_p is a tensor of shape {tuple(value.shape)}, {value.dtype}; it must be a "
            f"number. It looks like {looks_like}; pass arguments by name"
        )
    return check_number("dropout_p", value)


def check_whole_number(name: str, value: Any, what: str = "an int") -> int:
    """Likewise an int, or ``what`` an error calls it. One that an int64 cannot hold becomes the
    closest that it can."""
    if type(value) is int and -_INT64_MAX <= value <= _INT64_MAX:
        return value
    if isinstance(value, Tensor):
        _check_scalar_tensor(name, value, what)
        value = value.item()
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
        if value > _INT64_MAX:
            return _INT64_MAX
        return -_INT64_MAX if value < -_INT64_MAX else value
    raise ValueError(f"{name} is {_text(value)}; it must be {what}{by_name(value)}")


def check_flag(name: str, value: Any) -> bool:
    """True or False; 1, 0 and None count as these. Another int does not: it is a window or a number
    of splits that stands in another argument's place."""
    if isinstance(value, (bool, torch.SymBool)):
        return value
    is_bit = isinstance(value, int) and value in (0, 1)
    # NumPy's bool is no int; its name is bool_ before NumPy 2 and bool since.
    if value is None or is_bit or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise ValueError(f"{name} is {_text(value)}; it must be True or False")


def check_window_size(window_size: Sequence[int]) -> tuple[int, int]:
    """``(left, right)`` as ints; their ranges are the op's matter."""
    if not isinstance(window_size, (tuple, list, Sequence, Tensor)) or (
        isinstance(window_size, Tensor) and window_size.dim() != 1
    ):
        raise ValueError(
            f"window_size is {window_size!r}; it must be two ints, (left, right)"
            f"{by_name(window_size)}"
        )
    if len(window_size) != 2:
        raise ValueError(
            f"window_size is {tuple(window_size)}; it must have two entries, (left, right)"
        )
    left, right = window_size
    return check_whole_number("window_size[0]", left), check_whole_number("window_size[1]", right)


def refuse_dtensor(name: str, value: Tensor) -> None:
    """Ops know nothing of shards."""
    if type(value).__name__ == "DTensor":  # by name: importing it takes a second
        raise ValueError(
            f"{name} is a DTensor; attention takes plain tensors: {name}.to_local() where only "
            f"batch or heads are sharded, {name}.full_tensor() otherwise"
        )


def refuse_forward_mode(function: str, **tensors: Optional[Tensor]) -> None:
    """Refuses dual tensors, whose tangents the ops would drop: a derivative of 0."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a forward-mode tangent (torch.func.jvp, jacfwd or "
                f"torch.autograd.forward_ad), but {function} has reverse-mode gradients only; use "
                "torch.autograd.grad"
            )


def _check_scalar_tensor(name: str, value: Tensor, what: str) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} is a tensor that requires a gradient, but none flows into it; it must be "
            f"{what}, {name}.item()"
        )
    if (
        value.dim() != 0
        or value.device.type != "cpu"
        or value.is_complex()
        or value.dtype == torch.bool
    ):
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}; "
            f"it must be {what} or a real tensor without dimensions on the CPU"
        )


def by_name(value: Any) -> str:
    """What a refusal adds to a bool: it is a flag that was passed by position, most of the time."""
    return "; write flags by name, as in causal=True" if isinstance(value, bool) else ""


def counted(count: int, noun: str) -> str:
    """ "1 row" or "3 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _text(value: Any) -> str:
    """The value as an error names it: short, with its type."""
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({type(value).__name__})"
