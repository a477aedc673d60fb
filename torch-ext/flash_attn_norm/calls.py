"""How the package calls its ops: with refusals as ValueError, whatever torch makes of them, with
the errors that torch's stable interface hides, and with little time spent on the host."""

import re
from collections.abc import Iterable
from typing import Any, Callable, Optional

import torch
from torch import Tensor

# What a refusal's text begins with where torch may have lost its type: see refusals.h.
_TYPE = "ValueError: "


def call(op: Callable, arguments: tuple, renamed: Optional[dict[str, str]] = None) -> Any:
    """``op(*arguments)``; ``renamed`` are arguments with another name in the caller's signature
    than in the op's errors."""
    try:
        return _run(op, arguments)
    except (ValueError, RuntimeError) as error:
        told = _refusal(error, renamed or {}) or _hidden_error(error, op, arguments, renamed or {})
        if told is None:
            raise
        raise told from None


def _run(op: Callable, arguments: tuple) -> Any:
    # A formula that is registered for an op makes a Python function of its autograd key; below that
    # key 12 us of a call are saved.
    if _is_transformed() or records_gradient(arguments):
        return op(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _is_transformed() -> bool:
    """Whether a compiler traces the call, or torch.func transforms it."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def differentiable(op: Callable, setup_context: Callable, gradients: Callable) -> Callable:
    """The op as a function with the given formula, which is to be registered for the op as well.

    A compiler, and a call that records no gradient, meet the op. Any other call goes through an
    autograd function: torch's own way to a registered formula takes 40 us more per call for the 10
    arguments of a norm and 0.1 ms for the 17 of attention, as it asks the schema for each of them,
    and does not go through torch.func.grad.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = call(op, inputs)
            setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(gradients)

    class Transformed(torch.autograd.Function):
        """The form that torch.func asks for; 20 us slower."""

        generate_vmap_rule = True  # that of the op

        @staticmethod
        def forward(*inputs):
            return call(op, inputs)

        backward = staticmethod(gradients)

    Transformed.setup_context = staticmethod(setup_context)

    def run(*inputs):
        if torch.compiler.is_compiling() or not records_gradient(inputs):
            return call(op, inputs)
        return (Transformed if _is_transformed() else Eager).apply(*inputs)

    return run


def save_nothing(ctx, inputs, output) -> None:
    """The ``setup_context`` of a formula that looks at nothing."""


def records_gradient(inputs: Iterable) -> bool:
    """Whether autograd records a call of these inputs, not all of which need be tensors. Under
    torch.func it may record any call: a tensor that vmap maps does not tell."""
    if not torch.is_grad_enabled():
        return False
    for value in inputs:  # any() takes twice as long
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


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
    if "API call failed" in text and re.search("empty_strided|aten::contiguous", text):
        device = next(value.device for value in arguments if isinstance(value, Tensor))
        what = f"the results of this call, its workspace or a copy of an input on {device}"
        if device.type != "cuda":
            return RuntimeError(f"not enough memory for {what}")
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)  # raises what a kernel before this call has done
        return torch.OutOfMemoryError(f"CUDA out of memory: no room for {what}")
    return None
