"""Packed sequences of which only the first keys are used."""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .arguments import check_tensor, refuse_dtensor
from .attention_op import checks_values


class Sequences(NamedTuple):
    """What says where packed sequences lie, and what has a value for each of them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    alibi_slopes: Optional[Tensor]


def cut_at_used_keys(sequences: Sequences, seqused_k: Tensor) -> Sequences:
    """Two sequences for each: its queries with the keys that are used, and no queries with the
    others. What a kernel promises for a neighbour then holds for keys that are not used, whatever
    they hold, and for their gradients.

    What does not go together is given back as it is: the op says what is wrong with it.
    """
    cu_seqlens_q, cu_seqlens_k, alibi_slopes = sequences
    refuse_dtensor("seqused_k", seqused_k)
    check_tensor("seqused_k", seqused_k)
    for tensor in (cu_seqlens_q, cu_seqlens_k):
        if tensor.dim() != 1 or tensor.dtype != torch.int32 or tensor.shape[0] < 1:
            return sequences
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.device != cu_seqlens_k.device:
        return sequences
    batch_size = cu_seqlens_k.shape[0] - 1
    has_batch = isinstance(alibi_slopes, Tensor) and alibi_slopes.dim() == 2
    if has_batch and alibi_slopes.shape[0] != batch_size:
        return sequences
    _check_shape(seqused_k, batch_size, cu_seqlens_k.device)
    lengths = cu_seqlens_k.diff()
    if _may_read_values(seqused_k):
        if _of_all_calls(lengths < 0).any() or _of_all_calls(cu_seqlens_q.diff() < 0).any():
            return sequences
        _check_values(seqused_k, lengths)
    # The begin and the end of each sequence's used keys: 0, 3, 5, 9, and the last end, 9.
    begins = cu_seqlens_k[:-1]
    used_ends = begins + torch.minimum(seqused_k.clamp(min=0), lengths)
    pairs = torch.cat((torch.stack((begins, used_ends), -1).flatten(), cu_seqlens_k[-1:]))
    if has_batch:
        alibi_slopes = alibi_slopes.repeat_interleave(2, 0)
    return Sequences(cu_seqlens_q.repeat_interleave(2)[1:], pairs, alibi_slopes)


def _check_shape(seqused_k: Tensor, batch_size: int, device: torch.device) -> None:
    if seqused_k.device != device:
        raise ValueError(
            f"seqused_k is on {seqused_k.device} but cu_seqlens_k is on {device}; all tensors of a "
            "call must be on one device"
        )
    if seqused_k.dtype != torch.int32:
        raise ValueError(
            f"seqused_k has dtype {seqused_k.dtype}; it must be torch.int32, e.g. "
            "seqused_k.to(torch.int32)"
        )
    if tuple(seqused_k.shape) != (batch_size,):
        raise ValueError(
            f"seqused_k has shape {tuple(seqused_k.shape)}; it must be (batch_size,) = "
            f"({batch_size},)"
        )


def _may_read_values(tensor: Tensor) -> bool:
    """As ``check_inputs`` says; a capture of a CUDA graph is the op's to refuse."""
    if torch.compiler.is_compiling() or type(tensor).__name__ == "FakeTensor":
        return False
    if tensor.is_cuda:
        return checks_values() and not torch.cuda.is_current_stream_capturing()
    return tensor.is_cpu


def _of_all_calls(tensor: Tensor) -> Tensor:
    """What is behind a tensor that torch.func.vmap maps: the values of all its calls."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _check_values(seqused_k: Tensor, lengths: Tensor) -> None:
    wrong = (seqused_k < 0) | (seqused_k > lengths)
    if not _of_all_calls(wrong).any():
        return
    if torch._C._functorch.is_batchedtensor(wrong):
        raise ValueError(
            "seqused_k of one of the calls that torch.func.vmap maps has a wrong entry; each must "
            "lie between 0 and the sequence's length in cu_seqlens_k"
        )
    for index in wrong.nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"seqused_k[{index}] is {seqused_k[index].item()}; it must lie between 0 and the "
            f"sequence's length in cu_seqlens_k, {lengths[index].item()}"
        )
