"""Of which rows the backward pass computes delta once more, with dropout, and when it keeps it."""

import pytest
import torch


def random_values(keys, head_dim, longest):
    """Values (keys, head_dim) whose lengths are 1 to ``longest``, each with the same likelihood."""
    values = torch.nn.functional.normalize(torch.randn(keys, head_dim, dtype=torch.float64), dim=-1)
    return values * torch.rand(keys, 1, dtype=torch.float64) * (longest - 1) + values


def is_found(native, out, values, dropout_p) -> bool:
    least = values.square().sum(-1).min().item()
    return native.may_be_one_key(out.square().sum().item(), least, dropout_p)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("head_dim", [1, 3, 64])
def test_no_row_of_one_key_is_missed(native, head_dim, dropout_p):
    """Whichever key it is, wherever the other keys' values point and whichever of them are kept."""
    for _ in range(300):
        values = random_values(7, head_dim, longest=100)
        key = torch.randint(7, ()).item()
        others = torch.rand(7, dtype=torch.float64)
        others[key] = 0
        weights = others / others.sum() / 200
        weights[key] = 1 - weights.sum()
        keep = torch.rand(7) >= dropout_p
        keep[key] = True
        out = (weights * keep / (1 - dropout_p)) @ values
        assert is_found(native, out, values, dropout_p)


def test_rows_of_many_keys_are_left_out(native):
    values = random_values(64, 64, longest=1.5)
    assert not is_found(native, values.mean(0) / 0.9, values, 0.1)


def test_nan_counts_as_one_key(native):
    assert native.may_be_one_key(float("nan"), 1.0, 0.1)
    assert native.may_be_one_key(0.0, 0.0, 0.1)
    assert not native.may_be_one_key(0.0, 3e38, 0.1)


def delta_sums(native, out, stored, weights, values, dout):
    dprobs = values @ dout
    sums = native.DeltaSums()
    sums.own = (weights @ dprobs).item()
    sums.own_size = (weights @ dprobs.abs()).item()
    sums.stored = (stored @ dout).item()
    sums.stored_size = (stored * dout).abs().sum().item()
    sums.dout_size = dout.abs().sum().item()
    return sums


@pytest.mark.parametrize("size", [1.0, 1e-4], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_rounded_output_of_rounded_probabilities_is_this_calls_own(native, dtype, size):
    """That of a GPU's forward pass, down to elements that float16 has few digits for."""
    for _ in range(500):
        keys, head_dim = torch.randint(1, 40, (2,)).tolist()
        values = torch.randn(keys, head_dim, dtype=torch.float64) * size
        weights = torch.softmax(3 * torch.randn(keys, dtype=torch.float64), 0)
        out = weights.to(dtype).double() @ values
        dout = torch.randn(head_dim, dtype=torch.float64)
        sums = delta_sums(native, out, out.to(dtype).double(), weights, values, dout)
        assert sums.is_own(dtype == torch.bfloat16)


def test_an_output_of_several_calls_is_not(native):
    for dtype in (torch.bfloat16, torch.float16):
        values = torch.randn(30, 64, dtype=torch.float64)
        weights = torch.softmax(torch.randn(30, dtype=torch.float64), 0)
        out = weights @ values
        dout = out.sign()
        for other in (1.1 * out, 0.9 * out, 3 * out + 1):
            stored = other.to(dtype).double()
            sums = delta_sums(native, out, stored, weights, values, dout)
            assert not sums.is_own(dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lse", [0.0, -3.0, 1e4], ids=str)
def test_an_lse_says_that_other_keys_have_a_part(native, dtype, lse):
    """However close the deltas are. Sums in another order differ by a few roundings."""
    is_bf16 = dtype == torch.bfloat16
    sums = native.DeltaSums()
    sums.own_lse = lse
    for difference in (0.0, 1e-4 + 1e-6 * abs(lse)):
        for sign in (1, -1):
            sums.stored_lse = lse + sign * difference
            assert sums.is_own(is_bf16)
    sums.stored_lse = lse + 0.01 + 1e-5 * abs(lse)
    assert not sums.is_own(is_bf16)
    sums.own_lse = sums.stored_lse = float("-inf")  # no key: the stored delta is 0
    assert not sums.is_own(is_bf16)


def test_nan_is_never_its_own(native):
    sums = native.DeltaSums()
    assert sums.is_own(True)
    sums.own = sums.own_size = float("nan")
    assert not sums.is_own(True)
    sums = native.DeltaSums()
    sums.own_lse = float("nan")
    assert not sums.is_own(True)
