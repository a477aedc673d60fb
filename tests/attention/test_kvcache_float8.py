"""Attention to a float8 cache against the reference, which gets the numbers that the cache holds:
e4m3 times a descale, exactly. Rows and pages that no sequence uses hold NaN."""

import math

import pytest
import reference
import torch
from errors import (
    LSE_TOLERANCE,
    assert_same_bits,
    assert_within,
    float32_tolerance,
    poisoned_memory,
    tolerance,
)

from .kvcache_comparison import bits, converted, make_case, rotary_tables, rows_of, run_ours
from .test_kvcache import head_terms
from .test_kvcache_execution import SCALARS, compiled, ops_of, same, step

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
DESCALES = ["none", "number", "scalar", "heads", "batch and heads"]


def make_descale(kind, batch_size, num_heads_kv, place):
    """Between 1/2 and 2."""
    if kind == "none":
        return None
    if kind == "number":
        return 0.37
    shape = {"scalar": (), "heads": (num_heads_kv,), "batch and heads": (batch_size, num_heads_kv)}
    return torch.exp2(2 * torch.rand(shape[kind], device=place["device"]) - 1)


def descale_of(descale, batch_size, num_heads_kv) -> torch.Tensor:
    """(batch_size, num_heads_kv), float64, on the CPU; as float32 holds it."""
    value = torch.as_tensor(1.0 if descale is None else descale, dtype=torch.float32).double()
    return value.cpu().expand(batch_size, num_heads_kv)


def quantized(values, descale) -> torch.Tensor:
    """e4m3 of values (..., num_heads_kv, head_dim) / descale (num_heads_kv,), saturating."""
    divided = values.float() / descale.float().to(values.device)[:, None]
    return divided.clamp(-LARGEST, LARGEST).to(FLOAT8)


def make_float8_case(place, *arguments, descales=("number", "heads"), **options) -> dict:
    """``make_case`` with float8 caches."""
    case = make_case(place, *arguments, **options)
    sizes = case["q"].shape[0], case["k_cache"].shape[2]
    for name, kind in zip(("k", "v"), descales, strict=True):
        case[f"{name}_cache"] = case[f"{name}_cache"].to(FLOAT8)
        case[f"{name}_descale"] = make_descale(kind, *sizes, place)
    return case


def read_only(case, k_cache, v_cache, options) -> dict:
    """The same call after its append, on caches of float64 that hold the true numbers."""
    batch_size, num_heads_kv = case["q"].shape[0], case["k_cache"].shape[2]
    seqlen_new = case["k"].shape[1] if "k" in case else 0
    left_out = ("k", "v", "k_descale", "v_descale", "rotary_cos", "rotary_sin")
    plain = {name: value for name, value in case.items() if name not in left_out}
    lengths = case["cache_seqlens"]
    plain["cache_seqlens"] = torch.where(lengths < 0, lengths, lengths + seqlen_new)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        descale = descale_of(case[name.replace("cache", "descale")], batch_size, num_heads_kv)
        numbers = cache.double()
        for batch, length in enumerate(plain["cache_seqlens"].tolist()):
            where = rows_of(case, cache, batch, max(length, 0))
            numbers[where[0], where[1]] *= descale[batch][:, None].to(numbers.device)
        plain[name] = numbers
    if "rotary_cos" in case:
        plain["q"] = rotated_queries(case, options)
    return plain


def rotated_queries(case, options) -> torch.Tensor:
    advances = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
    tables = case["rotary_cos"], case["rotary_sin"]
    rows = []
    for batch, length in enumerate(case["cache_seqlens"].tolist()):
        at = torch.arange(case["q"].shape[1]) * advances + length
        rows.append(
            reference.rotate(
                case["q"][batch].double(), *tables, at, options.get("rotary_interleaved", True)
            )
        )
    return torch.stack(rows).to(case["q"].dtype)


def check(kernel, case, ours_options=None, **options) -> torch.Tensor:
    caches = [case["k_cache"].clone(), case["v_cache"].clone()]
    with poisoned_memory():
        out, softmax_lse = kernel.flash_attn_with_kvcache(
            **{**case, "k_cache": caches[0], "v_cache": caches[1]},
            return_softmax_lse=True,
            **options,
            **(ours_options or {}),
        )
    check_written(case, caches, options)
    plain = read_only(case, *caches, options)
    options = {name: value for name, value in options.items() if name != "rotary_interleaved"}
    expected = reference.attention_kvcache(**converted(plain, torch.float64), **options)
    if case["q"].dtype == torch.float32:
        reduced = caches[0].shape[0] * caches[0].shape[1] + case["q"].shape[-1]
        allowed, allowed_lse = float32_tolerance(expected[0], reduced), LSE_TOLERANCE
    else:
        in_torch = reference.attention_kvcache(**converted(plain, case["q"].dtype), **options)
        allowed = tolerance(expected[0], in_torch[0])
        # A rotated row of q may be rounded the other way.
        rotated = tolerance(expected[1], in_torch[1]) if "rotary_cos" in case else 0
        allowed_lse = max(LSE_TOLERANCE, rotated)
    assert out.dtype == case["q"].dtype
    assert_within("out", out, expected[0], allowed)
    assert_within("softmax_lse", softmax_lse, expected[1], allowed_lse)
    return out


def check_written(case, caches, options):
    """New rows are e4m3 of the given ones; every other bit is as it was."""
    sizes = case["q"].shape[0], case["k_cache"].shape[2]
    expected = [case["k_cache"].clone(), case["v_cache"].clone()]
    if "k" in case:
        for name, cache in zip(("k", "v"), expected, strict=True):
            descale = descale_of(case[f"{name}_descale"], *sizes)
            for batch, length in enumerate(case["cache_seqlens"].tolist()):
                if length < 0:
                    continue
                rows = case[name][batch].float()
                if name == "k" and "rotary_cos" in case:
                    at = torch.arange(length, length + len(rows))
                    interleaved = options.get("rotary_interleaved", True)
                    tables = case["rotary_cos"], case["rotary_sin"]
                    rows = reference.rotate(rows.double(), *tables, at, interleaved)
                where = rows_of(case, cache, batch, length + len(rows))
                at = [index[length:] for index in where]
                cache.view(torch.uint8)[at[0], at[1]] = quantized(rows, descale[batch]).view(
                    torch.uint8
                )
    for name, ours, wanted in zip(("k", "v"), caches, expected, strict=True):
        if name == "k" and "rotary_cos" in case:
            # In float32 a number next to the middle of two may be rounded to the other one.
            off = (bits(ours).int() - bits(wanted).int()).abs()
            assert off.max() <= 1
            assert (off != 0).float().mean() < 0.01
        else:
            assert_same_bits(f"{name}_cache", bits(ours), bits(wanted))


@pytest.mark.parametrize("descale", DESCALES)
@pytest.mark.parametrize("page_size", [None, 16])
def test_descales(kernel, place, page_size, descale):
    case = make_float8_case(
        place, [100, 1, 65], 2, 3, (8, 2), page_size=page_size, descales=(descale, descale)
    )
    check(kernel, case, causal=True)


@pytest.mark.parametrize("page_size", [None, 1, 3, 16, 32, 64, 256])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 16, 70])
def test_matches_the_reference(kernel, place, seqlen_q, page_size):
    case = make_float8_case(place, [300, 1, 129, 64], seqlen_q, heads=(8, 2), page_size=page_size)
    check(kernel, case, causal=True)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("length", [31, 33, 63, 64, 65, 127, 128, 129, 1000, 4096])
def test_lengths(kernel, bf16_place, length, page_size):
    lengths = [length, length - 1]
    case = make_float8_case(bf16_place, lengths, 1, heads=(4, 2), head_dim=128, page_size=page_size)
    check(kernel, case)


@pytest.mark.parametrize("seqlen_q", [1, 9])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1), (16, 2), (32, 1), (150, 1)], ids=str)
def test_groups(kernel, bf16_place, heads, seqlen_q):
    case = make_float8_case(bf16_place, [200, 77], seqlen_q, seqlen_q, heads, 32)
    check(kernel, case, causal=True)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("seqlen_q", [1, 12, 40])
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 72), (46, 46), (8, 200)],
    ids=str,
)
def test_head_dims(kernel, place, dims, seqlen_q, page_size):
    """Also with rows of odd pitch: a row that is written ends where the next one begins."""
    case = make_float8_case(place, [70, 0, 130], seqlen_q, 2, (4, 2), *dims, page_size=page_size)
    check(kernel, case, causal=True)


@pytest.mark.parametrize("dims", [(512, 512), (576, 512)], ids=str)
def test_large_head_dims(kernel, dims):
    """On the CPU alone."""
    place = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    check(kernel, make_float8_case(place, [70, 0, 130], 2, 2, (4, 2), *dims), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(512, 512), (576, 512), (64, 264)], ids=str)
def test_large_head_dims_are_refused_on_a_gpu(kernel, dims):
    """With nothing written."""
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    case = make_float8_case(place, [7, 0], 2, 2, (4, 2), *dims)
    caches = {name: case[name].clone() for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=r"head_dim.*float8 cache on a GPU.*at most 256"):
        kernel.flash_attn_with_kvcache(**{**case, **caches})
    for name, cache in caches.items():
        assert_same_bits(name, bits(cache), bits(case[name]))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"window_size": (20, 0)},
        {"window_size": (-1, 3)},
        {"window_size": (0, 0)},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_options(kernel, bf16_place, options, seqlen_q, page_size):
    case = make_float8_case(bf16_place, [300, 5, 65], seqlen_q, heads=(4, 2), page_size=page_size)
    check(kernel, case, **options)


@pytest.mark.parametrize("page_size", [None, 3, 64])
@pytest.mark.parametrize("seqlen_q", [1, 17])
def test_all_terms_together(kernel, place, seqlen_q, page_size):
    case = make_float8_case(place, [300, 40, 0], seqlen_q, 2, (6, 2), 40, 72, page_size)
    case |= head_terms(place, case, batch_slopes=True)
    check(kernel, case, causal=True, window_size=(60, -1), softcap=20.0)


@pytest.mark.parametrize("page_size", [None, 5, 32])
def test_left_padding(kernel, place, page_size):
    case = make_float8_case(place, [40, 9, 33], 3, 2, leftpad=[7, 0, 33], page_size=page_size)
    case |= head_terms(place, case)
    check(kernel, case, causal=True, window_size=(25, 0))


def test_rows_of_a_larger_cache(kernel, place):
    case = make_float8_case(
        place,
        [40, 9, 33],
        2,
        2,
        shuffled=True,
        leftpad=[3, 0, 1],
        descales=("batch and heads", "batch and heads"),
    )
    check(kernel, case, causal=True)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_splits(kernel, place, num_splits, page_size):
    case = make_float8_case(place, [1000, 3, 0, 513], 2, heads=(4, 2), page_size=page_size)
    case |= head_terms(place, case)
    check(kernel, case, {"num_splits": num_splits}, causal=True)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary_dim", [2, 64])
def test_rotary(kernel, place, rotary_dim, interleaved):
    case = make_float8_case(place, [0, 50, 63], 3, 5, page_size=16)
    case |= rotary_tables(place, 70, rotary_dim)
    check(kernel, case, causal=True, rotary_interleaved=interleaved)


def test_rows_of_padding(kernel, place):
    case = make_float8_case(place, [30, -1, 5, -7], 2, 2, page_size=16)
    check(kernel, case, causal=True)


def test_every_number(kernel, place):
    """One key: the output is its value. And the two NaN stay NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=place["device"]).view(2, 1, 1, 128)
    cache = codes.view(FLOAT8)
    q = torch.zeros(2, 1, 1, 128, **place)
    out = kernel.flash_attn_with_kvcache(q, cache.new_zeros(cache.shape), cache, v_descale=0.25)
    expected = cache.to(torch.float32) * 0.25
    assert torch.equal(out.isnan(), expected.isnan())
    assert_within("out", out.float().nan_to_num(), expected.nan_to_num(), 0)


def test_every_number_as_a_key(kernel, place):
    """q chooses one element of the only key: softmax_lse is its number."""
    codes = torch.arange(256, dtype=torch.uint8, device=place["device"]).view(2, 1, 1, 128)
    codes[..., 127] = 0  # NaN
    cache = codes.view(FLOAT8)
    q = torch.eye(128, **place).expand(2, 128, 128)[:, :, None].contiguous()
    _, lse = kernel.flash_attn_with_kvcache(
        q, cache, cache, softmax_scale=1.0, k_descale=0.5, return_softmax_lse=True
    )
    assert_within("softmax_lse", lse.flatten(), 0.5 * cache.float().flatten(), 1e-4)


@pytest.mark.parametrize("num_splits", [1, 2, 12])
@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_nan_in_a_row_that_is_seen_stays_nan(kernel, place, name, page_size, num_splits):
    descales = ("none", "none")
    case = make_float8_case(
        place, [3000, 3000], heads=(2, 2), page_size=page_size, descales=descales
    )
    where = rows_of(case, case[name], 1, 3000)
    case[name].view(torch.uint8)[where[0][1900], where[1][1900], 1, 7] = 0xFF
    nan = kernel.flash_attn_with_kvcache(**case, num_splits=num_splits).isnan()
    assert not nan[0].any()
    assert not nan[1, :, 0].any()
    assert nan[1, :, 1, 7].all()


SIZES = [0.0, 1e-30, 2.0**-10, 2.0**-6, 0.3, 17.0, 464.0, 465.0, 1e4, math.inf, math.nan]


def test_append_rounds_and_saturates(kernel, place):
    """Every middle of two neighbours, and numbers at and beyond the ends."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FLOAT8).float()
    rows = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor(SIZES)])
    rows = torch.cat([rows, -rows]).to(**place)
    for factor in (1.0, 3.0):
        k = (rows * factor)[None, None, :, None]
        cache = torch.zeros(1, 2, k.shape[2], 1, device=place["device"]).to(FLOAT8)
        caches = cache.clone(), cache.clone()
        kernel.flash_attn_with_kvcache(
            torch.zeros_like(k), *caches, k, k, cache_seqlens=0, k_descale=factor
        )
        for written, descale in zip(caches, (factor, 1.0), strict=True):
            wanted = (k.float() / descale).clamp(-LARGEST, LARGEST).to(FLOAT8)
            assert_same_bits("cache", bits(written[:, :1]), bits(wanted))
            assert_same_bits("cache", bits(written[:, 1:]), bits(cache[:, 1:]))


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e30])
def test_sizes_of_q(kernel, bf16_place, size):
    """Rows of q of any size that their dtype holds, beside others; scores of a usual size."""
    case = make_float8_case(bf16_place, [200], 5, heads=(8, 2))
    sizes = torch.tensor([1.0, size, 0.0, 1 / size, 1.0], device=bf16_place["device"])
    case["q"] = (case["q"].double() * sizes[:, None, None]).to(torch.bfloat16)
    plain = converted(read_only(case, case["k_cache"], case["v_cache"], {}), torch.float64)
    for scale in (size, 1 / size):
        usual = sizes * scale <= 100
        assert usual.sum() >= 2
        expected = reference.attention_kvcache(**plain, softmax_scale=scale)[0][:, usual]
        out = kernel.flash_attn_with_kvcache(**case, softmax_scale=scale)[:, usual]
        unit = torch.finfo(torch.bfloat16).eps * max(1, expected.abs().max().item())
        assert_within("out", out, expected, 4 * unit)


def test_strides(kernel, bf16_place):
    """Heads first, rows of an odd number of elements, and descales with gaps."""
    case = make_float8_case(bf16_place, [30, 70], 3, 2, heads=(4, 2), head_dim=32)
    case["k_descale"] = torch.rand(2, 2, device=bf16_place["device"]) + 0.5
    expected = kernel.flash_attn_with_kvcache(
        **{**case, "k_cache": case["k_cache"].clone(), "v_cache": case["v_cache"].clone()}
    )
    for columns in (0, 1, 16):
        strided = dict(case)
        for name in ("k_cache", "v_cache"):
            entries, rows, heads, head_dim = case[name].shape
            memory = torch.full((entries, heads, rows, head_dim + columns), 0x7F).byte()
            view = memory.to(bf16_place["device"]).view(FLOAT8)[..., :head_dim].transpose(1, 2)
            view.view(torch.uint8).copy_(case[name].view(torch.uint8))
            strided[name] = view
        wide = torch.full((2, 5), math.nan, device=bf16_place["device"])
        wide[:, ::3] = case["k_descale"]
        strided["k_descale"] = wide[:, ::3]
        assert_same_bits("out", kernel.flash_attn_with_kvcache(**strided), expected)


def test_packed_queries(kernel, place):
    """Without descales, with a block table."""
    case = make_float8_case(
        place, [70, 3, 200], page_size=16, descales=("none", "none"), heads=(4, 2)
    )
    expected = check(kernel, case, causal=True)
    bounds = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2, 3], [0, 70, 73, 273])]
    out = kernel.flash_attn_varlen_func(
        case["q"][:, 0].contiguous(),
        case["k_cache"],
        case["v_cache"],
        *(bound.to(place["device"]) for bound in bounds),
        1,
        200,
        causal=True,
        block_table=case["block_table"],
    )
    unit = torch.finfo(place["dtype"]).eps * max(1, expected.abs().max().item())
    assert_within("out", out, expected[:, 0], 4 * unit)


@pytest.mark.parametrize("page_size", [None, 16])
def test_opcheck(kernel, bf16_place, page_size):
    """Without the parts that compare clones of the caches, which torch cannot do in float8."""
    case = make_float8_case(bf16_place, [20, 7], 3, 2, page_size=page_size)
    table = case.get("block_table")
    descales = (None, case["v_descale"], case["k_descale"], 2.0)
    reading = [case["q"], case["k_cache"], case["v_cache"], None, None, case["cache_seqlens"]]
    reading += [None, None, table, None, None, 0, *SCALARS, 2, False]
    torch.library.opcheck(
        ops_of(kernel).attention_kvcache.default,
        (*reading, *descales),
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
    )
    appending = [case[name] for name in ("k_cache", "v_cache", "q", "k", "v")]
    appending += [None, None, case["cache_seqlens"], None, None, table, None, None]
    torch.library.opcheck(
        ops_of(kernel).attention_kvcache_append.default,
        (*appending, 0, *SCALARS, True, 0, False, *descales),
        test_utils="test_faketensor",
    )


@pytest.mark.parametrize("new", [0, 2], ids=["read", "append"])
def test_compiles_whole(kernel, bf16_place, new):
    case = make_float8_case(bf16_place, [20, 7], 2, new, page_size=16)
    expected = run_ours(kernel, case, causal=True)
    call = compiled(lambda case: step(kernel, case))
    with torch.no_grad():
        ours = call(case)
    same((*ours, case["k_cache"], case["v_cache"]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_a_captured_graph_reads_new_descales(kernel, page_size):
    """And new lengths, at every replay."""
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    descales = ("heads", "batch and heads")
    case = make_float8_case(place, [300, 150], 1, 2, page_size=page_size, descales=descales)
    before = {name: case[name].clone() for name in ("k_cache", "v_cache")}
    kernel.flash_attn_with_kvcache(**case, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.flash_attn_with_kvcache(**case, causal=True)
    for lengths in ([300, 150], [3, 0], [257, 149]):
        case["cache_seqlens"].copy_(torch.tensor(lengths))
        for name in ("k_descale", "v_descale"):
            case[name].uniform_(0.5, 2)
        for name, cache in before.items():
            case[name].copy_(cache)
        graph.replay()
        expected = kernel.flash_attn_with_kvcache(
            **{**case, **{name: cache.clone() for name, cache in before.items()}}, causal=True
        )
        assert_same_bits("out", out, expected)
