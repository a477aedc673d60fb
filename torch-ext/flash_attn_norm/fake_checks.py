"""What the checks of all ops' fakes share."""

import ctypes
from typing import Callable, Optional, Union

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def require(condition: Union[bool, SymBool], message: Callable[[], str]) -> None:
    """Raises ValueError unless the condition holds; where sizes are known only when a graph runs,
    torch turns this into a check of that time."""
    torch._check_value(condition, message)


def refuse_other_devices(first_name: str, first: Tensor, **tensors: Optional[Tensor]) -> None:
    """The op does this too, but with a tensor on "meta" torch calls the fake instead."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device} but {first_name} is on {first.device}; all tensors "
                "of a call must be on one device"
            )


def is_known(value: Union[float, SymInt, SymFloat]) -> bool:
    """Whether a trace has the number itself; the op checks others when the graph runs."""
    return not isinstance(value, (SymInt, SymFloat))


def in_float32(value: float) -> float:
    """As kernels see it: a number that leaves float32's range becomes infinite or zero there."""
    return ctypes.c_float(value).value


def transposed_text(name: str, tensor: Tensor, shape: str) -> str:
    """What a refusal adds where rows and heads seem to have changed places."""
    return (
        f"; {name} has shape {tuple(tensor.shape)}, expected {shape}: it looks transposed, pass "
        f"{name}.transpose(1, 2)"
    )
