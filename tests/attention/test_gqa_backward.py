"""Gradients of grouped-query attention: KV head h // group_size serves query head h, and dK, dV are
sums over its group."""

import pytest
import torch
from errors import (
    assert_same_bits,
    assert_within,
    assert_zero,
    poisoned_memory,
    surrounded_by_nan,
)

from .comparison import (
    allowed_errors,
    check,
    make_inputs,
    make_packed,
    random_dout,
    run_formula,
    run_ours,
)

# group sizes 1, 2, 3, 4, 7, 8 and MQA; only one of them is square (group size = num_heads_kv)
HEADS = [(2, 2), (4, 2), (6, 2), (12, 3), (14, 2), (16, 2), (5, 1)]
# (seqlen_q, seqlen_k, head_dim, head_dim_v): one row, more and fewer queries than keys, ragged tile
# ends, several tiles
SHAPES = [
    (1, 1, 64, 64),
    (1, 129, 128, 128),
    (63, 64, 32, 32),
    (128, 65, 64, 64),
    (127, 300, 80, 80),
    (257, 129, 128, 64),
]
DETERMINISTIC = {"deterministic": True}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}:{h[1]}")
def test_gradients_match_the_reference(kernel, bf16_place, heads, shape, causal):
    inputs = make_inputs(bf16_place, 2, shape[0], shape[1], heads, shape[2], shape[3])
    check(kernel, inputs, causal=causal)


@pytest.mark.parametrize("heads", [(14, 2), (12, 2)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_gradients_match_the_reference_in_each_dtype(kernel, place, heads):
    check(kernel, make_inputs(place, 2, 130, 193, heads, 64), causal=True)


@pytest.mark.parametrize("head_dim", [192, 256, 512])
def test_gradients_match_the_reference_at_large_head_dims(kernel, bf16_place, head_dim):
    check(kernel, make_inputs(bf16_place, 1, 70, 131, (6, 2), head_dim), causal=True)


def test_gradients_match_the_reference_over_many_tiles(kernel, bf16_place):
    check(kernel, make_inputs(bf16_place, 1, 1000, 1000, (4, 1), 64), causal=True)


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}:{h[1]}")
def test_packed_gradients_match_the_reference(kernel, bf16_place, heads):
    inputs = make_packed(bf16_place, [5, 1, 130, 0, 17], [5, 64, 130, 9, 3], heads)
    check(kernel, inputs, causal=True)


@pytest.mark.parametrize("heads", HEADS[1:], ids=lambda h: f"{h[0]}:{h[1]}")
def test_equals_multi_head_attention_on_repeated_heads(kernel, bf16_place, heads):
    inputs = make_inputs(bf16_place, 2, 67, 130, heads)
    group_size = heads[0] // heads[1]
    repeated = {n: inputs[n].repeat_interleave(group_size, dim=2) for n in ("k", "v")}
    dout = random_dout(inputs)
    grouped = run_ours(kernel, inputs, dout, causal=True)
    multi_head = run_ours(kernel, {**inputs, **repeated}, dout, causal=True)
    for name in ("dk", "dv"):
        shape = (*inputs["k"].shape[:2], heads[1], group_size, -1)
        multi_head[name] = multi_head[name].double().view(shape).sum(dim=3)
    expected = run_formula(inputs, dout, dtype=torch.float64, causal=True)
    allowed = allowed_errors(inputs, expected, dout=dout, causal=True)
    for name in expected:
        assert_within(name, grouped[name], multi_head[name], allowed[name])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "heads", [(4, 2), (12, 3), (14, 2), (16, 8)], ids=lambda h: f"{h[0]}:{h[1]}"
)
def test_one_query_head_reaches_its_own_kv_head_alone(kernel, bf16_place, heads, deterministic):
    inputs = make_inputs(bf16_place, 2, 70, 200, heads)
    num_heads_q, num_heads_kv = heads
    for head in {0, 1, num_heads_q // 2, num_heads_q - 1}:
        dout = torch.zeros_like(random_dout(inputs))
        dout[:, :, head] = 1
        ours = run_ours(kernel, inputs, dout, causal=True, deterministic=deterministic)
        kv_head = head // (num_heads_q // num_heads_kv)
        others_q = [h for h in range(num_heads_q) if h != head]
        others_kv = [h for h in range(num_heads_kv) if h != kv_head]
        assert_zero("dq of other query heads", ours["dq"][:, :, others_q])
        for name in ("dk", "dv"):
            assert_zero(f"{name} of other KV heads", ours[name][:, :, others_kv])
            assert ours[name][:, :, kv_head].any(), f"{name} of the head's own KV head is zero"


def test_order_of_query_heads_inside_a_group_does_not_matter(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 130, 150, (14, 2))
    dout = random_dout(inputs)
    order = torch.cat([torch.randperm(7), 7 + torch.randperm(7)]).to(dout.device)
    plain = run_ours(kernel, inputs, dout, causal=True)
    permuted = run_ours(
        kernel, {**inputs, "q": inputs["q"][:, :, order]}, dout[:, :, order], causal=True
    )
    expected = run_formula(inputs, dout, dtype=torch.float64, causal=True)
    allowed = allowed_errors(inputs, expected, dout=dout, causal=True)
    for name in ("dk", "dv"):
        assert_within(name, permuted[name], plain[name], allowed[name])
    assert_within("dq", permuted["dq"], plain["dq"][:, :, order], allowed["dq"])


def test_permuted_groups_give_permuted_bits(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 130, 150, (12, 4))
    dout = random_dout(inputs)
    kv_order = torch.tensor([2, 0, 3, 1], device=dout.device)
    q_order = (kv_order[:, None] * 3 + torch.arange(3, device=dout.device)).flatten()
    permuted_inputs = {
        "q": inputs["q"][:, :, q_order],
        "k": inputs["k"][:, :, kv_order],
        "v": inputs["v"][:, :, kv_order],
    }
    plain = run_ours(kernel, inputs, dout, causal=True, **DETERMINISTIC)
    permuted = run_ours(kernel, permuted_inputs, dout[:, :, q_order], causal=True, **DETERMINISTIC)
    for name, order in (("out", q_order), ("dq", q_order), ("dk", kv_order), ("dv", kv_order)):
        assert_same_bits(name, permuted[name], plain[name][:, :, order])


@pytest.mark.parametrize("heads", [(12, 2), (16, 4), (7, 1)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_poison_around_inputs_and_in_fresh_memory_reaches_no_result(kernel, bf16_place, heads):
    inputs = make_inputs(bf16_place, 2, 65, 129, heads)
    dout = random_dout(inputs)
    clean = check(kernel, inputs, dout, causal=True, ours_options=DETERMINISTIC)
    poisoned = {name: surrounded_by_nan(tensor) for name, tensor in inputs.items()}
    ours = run_ours(kernel, poisoned, surrounded_by_nan(dout), causal=True, **DETERMINISTIC)
    for name in clean:
        assert_same_bits(name, ours[name], clean[name])


def test_poisoned_rows_outside_all_sequences_reach_no_result(kernel, bf16_place):
    inputs = make_packed(bf16_place, [5, 0, 129], [64, 3, 70], (14, 2), more_rows=40)
    covered = {"q": 134, "k": 137, "v": 137}
    for name, rows in covered.items():
        inputs[name][rows:] = float("nan")
    dout = random_dout(inputs)
    dout[134:] = float("nan")
    ours = run_ours(kernel, inputs, dout)
    assert_zero("out", ours["out"][134:])
    assert torch.isneginf(ours["softmax_lse"][:, 134:]).all()
    for name, rows in covered.items():
        assert_zero(f"d{name}", ours[f"d{name}"][rows:])
        assert ours[f"d{name}"].isfinite().all(), name


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_deterministic_gradients_repeat_bit_for_bit(kernel, bf16_place, packed):
    if packed:
        inputs = make_packed(bf16_place, [100, 1, 257], [33, 190, 257], (8, 2), 128)
    else:
        inputs = make_inputs(bf16_place, 2, 129, 257, (8, 2), 128)
    dout = random_dout(inputs)
    first = run_ours(kernel, inputs, dout, causal=True, **DETERMINISTIC)
    for _ in range(20):
        again = run_ours(kernel, inputs, dout, causal=True, **DETERMINISTIC)
        for name in first:
            assert_same_bits(name, again[name], first[name])


@pytest.mark.parametrize("seqlens", [(5, 2), (130, 64), (300, 1)], ids=str)
def test_rows_that_see_no_key_give_zeros(kernel, place, seqlens):
    seqlen_q, seqlen_k = seqlens
    inputs = make_inputs(place, 2, seqlen_q, seqlen_k, (6, 2))
    ours = check(kernel, inputs, causal=True)
    blind = seqlen_q - seqlen_k
    assert_zero("out", ours["out"][:, :blind])
    assert_zero("dq", ours["dq"][:, :blind])
    assert torch.isneginf(ours["softmax_lse"][:, :, :blind]).all()


def transposed(tensor):
    """The same values, heads before rows in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def last_dimension_first(tensor):
    """The same values, the last dimension of stride seqlen."""
    return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@pytest.mark.parametrize("layout", [transposed, last_dimension_first, surrounded_by_nan])
@pytest.mark.parametrize("heads", [(4, 2), (21, 3)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_strides_do_not_matter(kernel, bf16_place, heads, layout):
    inputs = make_inputs(bf16_place, 2, 33, 130, heads)
    dout = random_dout(inputs)
    contiguous = run_ours(kernel, inputs, dout, causal=True, **DETERMINISTIC)
    strided_inputs = {name: layout(tensor) for name, tensor in inputs.items()}
    for name, tensor in strided_inputs.items():
        assert torch.equal(tensor, inputs[name])
        assert not tensor.is_contiguous()
    strided = run_ours(kernel, strided_inputs, layout(dout), causal=True, **DETERMINISTIC)
    for name in contiguous:
        assert_same_bits(name, strided[name], contiguous[name])


def test_an_expanded_dout_is_one_of_its_values(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 65, 65, (4, 2))
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    with poisoned_memory():
        kernel.flash_attn_func(**leaves, causal=True).sum().backward()
    ours = run_ours(kernel, inputs, causal=True)
    for name, leaf in leaves.items():
        assert_same_bits(f"d{name}", leaf.grad, ours[f"d{name}"])
