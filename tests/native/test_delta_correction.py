"""Which rows' outputs the backward pass computes once more, with dropout."""

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
