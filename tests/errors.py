"""How far a result may lie from the reference, and memory in which mistakes show."""

import contextlib
import math

import torch
from torch import Tensor

FLOOR = 1e-5
LSE_TOLERANCE = 1e-3
FLOAT32_ULPS = 8


def tolerance(reference: Tensor, in_torch: Tensor) -> float:
    """Twice the error of the same formula in torch at the same dtype, and a floor."""
    return 2 * largest_difference(in_torch, reference) + FLOOR


def float32_tolerance(reference: Tensor, reduced_length: int) -> float:
    """A few units in the last place of the largest element (at least of 1, the size of the inputs),
    growing as rounding errors do with the square root of the number of summed terms."""
    largest = reference.abs().max().item() if reference.numel() else 0.0
    return FLOAT32_ULPS * 2**-23 * math.sqrt(reduced_length) * max(largest, 1.0)


# Rows (of attention: times heads; of a sum over rows: its columns) from which on torch's largest
# error of one draw says what torch's error is.
REPRESENTATIVE_ROWS = 512
MOST_DRAWS = 8


def draws_for(rows: int) -> int:
    """Draws of inputs, whose largest error in torch is the one that the tolerance is made of."""
    return min(MOST_DRAWS, -(-REPRESENTATIVE_ROWS // rows)) if rows > 0 else 1


def another_draw(tensor, generator) -> torch.Tensor:
    """Normal random numbers of the tensor's mean square, and zeros where it has them."""
    nonzero = tensor != 0
    size = tensor[nonzero].double().square().mean().sqrt()
    drawn = torch.randn(
        tensor.shape, dtype=torch.float32, device=tensor.device, generator=generator
    )
    return torch.where(nonzero, drawn * size, 0).to(tensor.dtype)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|; NaN if either holds one, and elements that are infinite in both differ by 0."""
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return torch.where(a == b, 0.0, (a - b).abs()).max().item()


def assert_within(name: str, ours: Tensor, reference: Tensor, allowed: float) -> None:
    difference = largest_difference(ours, reference)
    # "not <=" fails on NaN too
    assert difference <= allowed, (
        f"{name}: max|ours - reference| = {difference:.3e} > {allowed:.3e}"
    )


def assert_zero(name: str, tensor: Tensor) -> None:
    assert torch.equal(tensor, torch.zeros_like(tensor)), f"{name} is not exactly zero"


def assert_same_bits(name: str, a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype, f"{name}: {a.dtype} and {b.dtype}"
    assert torch.equal(a, b), f"{name}: differs by up to {largest_difference(a, b):.3e}"


@contextlib.contextmanager
def poisoned_memory():
    """Torch fills what it allocates with NaN (integers: the largest value, bytes: 0xFF), so that an
    element that is never written, or workspace that is read before it is written, shows."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]


def surrounded_by_nan(tensor: Tensor) -> Tensor:
    """The same values as a strided view into memory that holds NaN everywhere else: one index more
    in each dimension but the last, 8 elements more before and after the values of the last."""
    shape = [size + 1 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 16]
    memory = tensor.new_full(shape, math.nan)
    view = memory[tuple(slice(0, size) for size in tensor.shape[:-1])]
    view = view[..., 8 : 8 + tensor.shape[-1]]
    view.copy_(tensor)
    return view
