"""How the package calls its ops: with refusals as ValueError, whatever torch makes of them, and
with the errors that torch's stable interface hides."""

import re
from typing import Any, Callable, Optional

import torch
from torch import Tensor

# What a refusal's text begins with where torch may have lost its type: see refusals.h.
_TYPE = "ValueError: "


def call(op: Callable, arguments: tuple, renamed: Optional[dict[str, str]] = None) -> Any:
    """``op(*arguments)``; ``renamed`` are arguments with another name in the caller's signature
    than in the op's errors."""
    try:
        return op(*arguments)
    except (ValueError, RuntimeError) as error:
        told = _refusal(error, renamed or {}) or _hidden_error(error, op, arguments, renamed or {})
        if told is None:
            raise
        raise told from None


def _refusal(error: Exception, renamed: dict[str, str]) -> Optional[ValueError]:
    """The error to raise instead; None for one that is right as it is."""
    text = str(error)
    if not text.startswith(_TYPE) and (not renamed or not isinstance(error, ValueError)):
        return None
    text = text[len(_TYPE) :] if text.startswith(_TYPE) else text
    for name, other in renamed.items():
        text = re.sub(rf"\b{name}\b", other, text)
    return ValueError(text)


# Of the arguments that ops take; rng_state is int64.
_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.int64,
)


def _hidden_error(
    error: Exception, op: Callable, arguments: tuple, renamed: dict[str, str]
) -> Optional[Exception]:
    """The error behind one whose text names nothing but a function of torch's stable interface: a
    dtype that it has no number for, or memory that is not there. None for another error."""
    text = str(error)
    if "Not yet supported ScalarType" in text:
        for argument, value in zip(op.default._schema.arguments, arguments):
            if isinstance(value, Tensor) and value.dtype not in _DTYPES:
                name = "block_table" if argument.name == "page_table" else argument.name
                name = renamed.get(name, name)
                return ValueError(f"{name} has dtype {value.dtype}, which no function here takes")
    if "API call failed" in text and re.search('"aten::(new_empty|contiguous)"', text):
        device = next(value.device for value in arguments if isinstance(value, Tensor))
        what = f"the results of this call, its workspace or a copy of an input on {device}"
        if device.type != "cuda":
            return RuntimeError(f"not enough memory for {what}")
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)  # raises what a kernel before this call has done
        return torch.OutOfMemoryError(f"CUDA out of memory: no room for {what}")
    return None
