"""The append to a key-value cache under torch's own machinery for views and transforms."""

from typing import NoReturn

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops


def _append_of_views(k_cache: Tensor, v_cache: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    """The op where an input is a view of the negative or conjugate numbers of those in memory.
    Torch's own way is to call it with copies, in which new rows of a cache would be lost."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.is_neg() or cache.is_conj():
            numbers = "conjugates" if cache.is_conj() else "negatives"
            raise ValueError(
                f"{name} is a view of the {numbers} of what is in memory, which new rows cannot be "
                f"written into; pass {name}.clone()"
            )
    resolved = (
        value.resolve_conj().resolve_neg() if isinstance(value, Tensor) else value
        for value in arguments
    )
    return ops.attention_kvcache_append(k_cache, v_cache, *resolved)


def _append_batched(info, in_dims, *arguments) -> NoReturn:
    raise NotImplementedError(
        "flash_attn_with_kvcache writes k and v into its caches, which torch.func.vmap does not "
        "follow; call it once, with the mapped dimension as a part of batch_size"
    )


def refuse_functionalization(*tensors: Tensor) -> None:
    """Refuses what torch.func.functionalize would call the op with; a compiler does it another
    way."""
    if not torch.compiler.is_compiling() and any(map(torch._is_functional_tensor, tensors)):
        raise NotImplementedError(
            "flash_attn_with_kvcache writes k and v into its caches, which "
            "torch.func.functionalize does not follow; call it outside, or use torch.compile"
        )


_library = torch.library.Library(ops.name, "IMPL")
_library.impl("attention_kvcache_append", _append_of_views, "Negative")
_library.impl("attention_kvcache_append", _append_of_views, "Conjugate")
torch.library.register_vmap(add_op_namespace_prefix("attention_kvcache_append"), _append_batched)
