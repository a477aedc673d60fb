"""The kernels of one card only, beside the portable ones on the same inputs.

The other tests compare with the reference whatever kernels a card runs. Here it is shown that the
switch works, that both agree on lengths with many tiles per CTA, and that two calls at once keep
their tiles apart.
"""

import pytest
import torch
from errors import LSE_TOLERANCE, poisoned_memory, tolerance

from .comparison import check, cumulative, longest, make_inputs, make_packed, run_formula

pytestmark = pytest.mark.gpu
PLACE = {"device": "cuda", "dtype": torch.bfloat16}
SWITCH = "FLASH_ATTN_NORM_PORTABLE"


def forward(kernel, inputs: dict, **options) -> dict:
    with poisoned_memory(), torch.no_grad():
        if "cu_seqlens_q" in inputs:
            options["max_seqlen_q"] = longest(inputs["cu_seqlens_q"])
            options["max_seqlen_k"] = longest(inputs["cu_seqlens_k"])
            out, lse = kernel.flash_attn_varlen_func(**inputs, return_softmax_lse=True, **options)
        else:
            out, lse = kernel.flash_attn_func(**inputs, return_softmax_lse=True, **options)
    return {"out": out, "softmax_lse": lse}


def check_both(kernel, monkeypatch, inputs: dict, **options) -> None:
    """Both paths are within the derived tolerance of the reference, so within its double of each
    other."""
    monkeypatch.delenv(SWITCH, raising=False)
    own = forward(kernel, inputs, **options)
    monkeypatch.setenv(SWITCH, "1")
    portable = forward(kernel, inputs, **options)
    with torch.no_grad():
        expected = run_formula_forward(inputs, torch.float64, **options)
        in_torch = run_formula_forward(inputs, inputs["q"].dtype, **options)
    allowed = tolerance(expected["out"], in_torch["out"])
    for result in (own, portable):
        assert (result["out"].double() - expected["out"]).abs().max().item() <= allowed
    assert (own["out"].double() - portable["out"].double()).abs().max().item() <= 2 * allowed
    seen = expected["softmax_lse"].isfinite()
    assert torch.equal(own["softmax_lse"].isfinite(), seen)
    difference = (own["softmax_lse"] - expected["softmax_lse"])[seen].abs().max().item()
    assert difference <= LSE_TOLERANCE


def run_formula_forward(inputs: dict, dtype: torch.dtype, **options) -> dict:
    with torch.enable_grad():
        results = run_formula(inputs, dtype=dtype, **options)
    return {name: results[name] for name in ("out", "softmax_lse")}


def test_the_switch_chooses_other_kernels(kernel, monkeypatch):
    """On a card without kernels of its own both runs are the same ones."""
    inputs = make_inputs(PLACE, 1, 700, heads=(4, 2), head_dim=128)
    monkeypatch.delenv(SWITCH, raising=False)
    own = forward(kernel, inputs)["out"]
    monkeypatch.setenv(SWITCH, "0")
    assert torch.equal(own, forward(kernel, inputs)["out"])
    monkeypatch.setenv(SWITCH, "1")
    portable = forward(kernel, inputs)["out"]
    assert torch.equal(own, portable) == (torch.cuda.get_device_capability() != (9, 0))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (300, 40)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_many_tiles_per_cta(kernel, monkeypatch, head_dim, options):
    inputs = make_inputs(PLACE, 2, 2100, 1900, heads=(12, 4), head_dim=head_dim)
    check_both(kernel, monkeypatch, inputs, **options)


def test_many_tiles_of_the_general_kernel(kernel, monkeypatch):
    inputs = make_inputs(PLACE, 2, 2000, heads=(12, 4), head_dim=128)
    inputs["alibi_slopes"] = torch.rand(2, 12, device="cuda")
    check_both(kernel, monkeypatch, inputs, causal=True, softcap=20.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(192, 128), (136, 40), (64, 128), (256, 64)], ids=str)
def test_value_head_dims(kernel, monkeypatch, head_dims, causal):
    head_dim, head_dim_v = head_dims
    inputs = make_inputs(PLACE, 1, 1000, heads=(6, 2), head_dim=head_dim, head_dim_v=head_dim_v)
    check_both(kernel, monkeypatch, inputs, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ragged_batch(kernel, monkeypatch, head_dim, causal):
    lengths_q = [700, 0, 1, 129, 2000, 64, 0, 333]
    lengths_k = [700, 5, 0, 400, 1500, 64, 0, 1]
    inputs = make_packed(PLACE, lengths_q, lengths_k, (8, 2), head_dim, more_rows=70)
    check_both(kernel, monkeypatch, inputs, causal=causal)


MASKS = [{}, {"causal": True}, {"window_size": (30, 9)}]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_short_and_long_sequences_together(kernel, monkeypatch, head_dim, options):
    """Those of up to 64 rows and 256 keys have tiles of their own, and run in another kernel."""
    lengths_q = [1, 64, 65, 0, 33, 7, 500, 64] + [20] * 40
    lengths_k = [64, 256, 10, 5, 257, 0, 700, 90] + [20] * 40
    inputs = make_packed(PLACE, lengths_q, lengths_k, (8, 2), head_dim, more_rows=70)
    check_both(kernel, monkeypatch, inputs, **options)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_dense_batch_of_few_rows(kernel, monkeypatch, head_dim, options):
    """More tiles than CTAs, of which a multiprocessor runs several."""
    inputs = make_inputs(PLACE, 130, 50, 130, heads=(4, 2), head_dim=head_dim)
    inputs["s_aux"] = torch.randn(4, **PLACE)
    check_both(kernel, monkeypatch, inputs, **options)


@pytest.mark.parametrize("lengths", [[100, 1, 300], [50, 1] + [30] * 50], ids=["long", "short"])
def test_rows_behind_a_sequence_may_be_anything(kernel, lengths):
    """NaN behind the last covered row and infinities in the neighbours: tiles reach into both."""
    inputs = make_packed(PLACE, lengths, heads=(4, 4), head_dim=128, more_rows=200)
    first, covered = lengths[0], sum(lengths)
    clean = forward(kernel, inputs, causal=True)["out"]
    for name in ("k", "v"):
        inputs[name][covered:] = float("nan")
        inputs[name][first] = float("inf")  # the sequence of one row
    dirty = forward(kernel, inputs, causal=True)["out"]
    for rows in (slice(0, first), slice(first + 1, covered)):
        assert torch.equal(clean[rows], dirty[rows])


def test_two_streams_at_once(kernel):
    """Each call counts its tiles in a workspace of its own."""
    inputs = [make_inputs(PLACE, 4, 1024, heads=(8, 8), head_dim=128) for _ in range(2)]
    alone = [forward(kernel, x, causal=True)["out"] for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = [[], []]
    with torch.no_grad():
        for _ in range(10):
            for stream, x, found in zip(streams, inputs, results, strict=True):
                with torch.cuda.stream(stream):
                    found.append(kernel.flash_attn_func(**x, causal=True))
    torch.cuda.synchronize()
    for expected, found in zip(alone, results, strict=True):
        assert all(torch.equal(expected, out) for out in found)


def test_replays_of_a_graph_start_from_the_first_tile(kernel):
    inputs = make_packed(PLACE, [900, 900], heads=(8, 8), head_dim=128)

    def run():
        return kernel.flash_attn_varlen_func(
            **inputs, max_seqlen_q=1800, max_seqlen_k=1800, causal=True
        )

    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for lengths in ([900, 900], [1, 1799], [1800, 0], [900, 900]):
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                inputs[name].copy_(cumulative(lengths, "cuda"))
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, run())


def test_gradients_through_the_own_forward(kernel):
    check(kernel, make_inputs(PLACE, 2, 300, heads=(6, 2), head_dim=128), causal=True)
