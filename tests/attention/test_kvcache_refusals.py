"""Bad calls with a key-value cache: an error that names the argument; nothing is written."""

import pytest
import torch
from errors import assert_same_bits
from torch.autograd import forward_ad

from .comparison import make_packed
from .kvcache_comparison import bits, lengths_tensor, make_case, random_pages, rotary_tables
from .test_refusals import refused


@pytest.fixture
def case(bf16_place):
    return make_case(bf16_place, [30, 9], 2, 3, heads=(4, 2), head_dim=16)


@pytest.fixture
def paged(bf16_place):
    return make_case(bf16_place, [30, 9], 2, 3, heads=(4, 2), head_dim=16, page_size=8)


def refused_whole(kernel, case, *parts, **changes):
    """Refused with these parts in the text, and no bit of the caches has changed."""
    case = {**case, **changes}
    before = {name: case[name].clone() for name in ("k_cache", "v_cache")}
    refused(lambda: kernel.flash_attn_with_kvcache(**case), *parts)
    for name, cache in before.items():
        assert_same_bits(name, bits(case[name]), bits(cache))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
def test_rank(kernel, case, name):
    refused_whole(kernel, case, name, "3 dimensions", "4", **{name: case[name][0]})


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "v"])
def test_dtypes(kernel, case, name):
    wrong = case[name].to(torch.float16)
    cure = "make the cache in q's" if "cache" in name else f"cast {name}, {name}.to(torch.bfloat16)"
    said = name, "torch.float16", "torch.bfloat16", cure
    refused_whole(kernel, case, *said, **{name: wrong})
    meta = {n: value.to("meta") for n, value in {**case, name: wrong}.items()}
    refused(lambda: kernel.flash_attn_with_kvcache(**meta), *said)


def test_dtype_that_is_not_taken(kernel, case):
    names = ("q", "k", "v", "k_cache", "v_cache")
    refused_whole(
        kernel, case, "torch.float64", "allowed", **{name: case[name].double() for name in names}
    )


@pytest.mark.gpu
def test_float32_on_a_gpu(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.float32}
    refused_whole(kernel, make_case(place, [3], 1, 1), "torch.float32 on cuda:0", "torch.bfloat16")


@pytest.mark.parametrize(
    ("name", "index", "part"),
    [
        ("k", (slice(1),), "(batch_size, seqlen_new, num_heads_kv, head_dim) = (2, 3, 2, 16)"),
        ("v", (slice(None), slice(2)), "= (2, 3, 2, 16)"),
        ("k", (..., slice(1), slice(None)), "= (2, 3, 2, 16)"),
        ("v", (..., slice(8)), "= (2, 3, 2, 16)"),
        ("k_cache", (..., slice(8)), "q has head_dim 16 and k_cache has head_dim 8"),
        ("v_cache", (slice(1),), "all but the last dimension must be equal"),
        ("q", (slice(None), slice(None), slice(3)), "q has 3 heads and the cache has 2"),
    ],
)
def test_shapes(kernel, case, name, index, part):
    refused_whole(kernel, case, name, part, **{name: case[name][index]})


@pytest.mark.parametrize("dims", [(513, 64), (576, 64), (576, 576), (64, 513), (0, 64), (64, 0)])
def test_head_dims(kernel, bf16_place, dims):
    head_dim, head_dim_v = dims
    k_cache = torch.zeros(1, 4, 1, head_dim, **bf16_place)
    v_cache = torch.zeros(1, 4, 1, head_dim_v, **bf16_place)
    refused(
        lambda: kernel.flash_attn_with_kvcache(k_cache[:, :1], k_cache, v_cache),
        "allowed are 1 to 512",
    )


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_last_stride(kernel, case, name):
    strided = case[name].transpose(2, 3).contiguous().transpose(2, 3)
    refused_whole(kernel, case, name, "unit stride", **{name: strided})


@pytest.mark.parametrize("name", ["cache_seqlens", "cache_batch_idx", "cache_leftpad"])
def test_index_tensors(kernel, case, name, bf16_place):
    good = lengths_tensor([0, 1], bf16_place)
    refused_whole(kernel, case, name, "torch.int64", "torch.int32", **{name: good.long()})
    refused_whole(kernel, case, name, "(3,)", "(2,)", **{name: good.new_zeros(3)})
    strided = good.new_zeros(4)[::2]
    refused_whole(kernel, case, name, "contiguous", **{name: strided})


def test_page_table(kernel, paged):
    table = paged["block_table"]
    refused_whole(kernel, paged, "block_table", "torch.int64", block_table=table.long())
    refused_whole(kernel, paged, "block_table", "(1, ", block_table=table[:1])
    refused_whole(kernel, paged, "block_table", "batch_size", block_table=table[0])
    refused_whole(kernel, paged, "block_table", "stride", block_table=table.t().contiguous().t())
    refused_whole(kernel, paged, "two names", page_table=table)
    index = torch.zeros(2, dtype=torch.int32, device=table.device)
    refused_whole(kernel, paged, "cache_batch_idx and block_table", cache_batch_idx=index)
    no_pages = {name: paged[name][:0] for name in ("k_cache", "v_cache")}
    refused_whole(kernel, paged, "no pages", **no_pages)


def test_cache_of_too_few_rows(kernel, case):
    fewer = {name: case[name][:1].clone() for name in ("k_cache", "v_cache")}
    refused_whole(kernel, case, "k_cache", "batch_size is 2", "cache_batch_idx", **fewer)


@pytest.mark.parametrize("name", ["k", "v"])
def test_only_one_of_the_new(kernel, case, name):
    refused_whole(kernel, case, f"{name} is missing", **{name: None})


def test_append_without_lengths(kernel, case):
    refused_whole(kernel, case, "cache_seqlens is missing", cache_seqlens=None)


def test_append_to_one_memory(kernel, case):
    refused_whole(kernel, case, "share memory", v_cache=case["k_cache"])


class TestRotary:
    def test_without_new_rows(self, kernel, case, bf16_place):
        tables = rotary_tables(bf16_place, 40, 8)
        refused_whole(kernel, case, "given without k", **tables, k=None, v=None)

    def test_one_table(self, kernel, case, bf16_place):
        tables = rotary_tables(bf16_place, 40, 8)
        refused_whole(kernel, case, "rotary_sin is missing", rotary_cos=tables["rotary_cos"])

    def test_shapes(self, kernel, case, bf16_place):
        tables = rotary_tables(bf16_place, 40, 18)
        refused_whole(kernel, case, "rotary_cos", "(40, 9)", "16", **tables)
        tables = rotary_tables(bf16_place, 40, 8)
        tables["rotary_sin"] = tables["rotary_sin"][:, :3]
        refused_whole(kernel, case, "(40, 4)", "(40, 3)", **tables)

    def test_tables_that_hold_each_angle_twice(self, kernel, case, bf16_place):
        tables = rotary_tables(bf16_place, 40, 16)
        twice = {name: torch.cat([table, table], dim=-1) for name, table in tables.items()}
        parts = ("rotary_cos has shape (40, 16)", "twice", "rotary_cos[:, :rotary_dim // 2]")
        refused_whole(kernel, case, *parts, "rotary_interleaved=False", **twice)

    @pytest.mark.parametrize("place", ["of values", "meta"])
    def test_tables_of_transformers(self, kernel, case, bf16_place, place):
        """The cure leads to a call that gives what the table says."""
        case = {name: tensor.nan_to_num() for name, tensor in case.items()}
        tables = rotary_tables(bf16_place, 40, 16)
        wrong = {n: torch.cat([table, table], dim=-1)[None] for n, table in tables.items()}
        given = {**case, **wrong}
        if place == "meta":
            given = {name: tensor.to("meta") for name, tensor in given.items()}
        refused(
            lambda: kernel.flash_attn_with_kvcache(**given),
            "rotary_cos has shape (1, 40, 16), 3 dimensions; expected 2: (seqlen_rotary,",
            "a row for each position from 0 on",
            "pass rotary_cos[0, :, :8], the other likewise, and rotary_interleaved=False",
        )
        copies = {n: case[n].clone() for n in ("k_cache", "v_cache")}
        cured = {name: table[0, :, :8] for name, table in wrong.items()}
        out = kernel.flash_attn_with_kvcache(**case, **cured, rotary_interleaved=False)
        same = {**case, **copies, **tables}
        assert torch.equal(out, kernel.flash_attn_with_kvcache(**same, rotary_interleaved=False))

    def test_ranks(self, kernel, case, bf16_place):
        tables = rotary_tables(bf16_place, 40, 8)
        wrong = {**tables, "rotary_sin": tables["rotary_sin"][None]}
        refused_whole(kernel, case, "rotary_sin has shape (1, 40, 4)", **wrong)
        wrong = {**tables, "rotary_cos": tables["rotary_cos"][0]}
        refused_whole(kernel, case, "rotary_cos has shape (4,), 1 dimension", "expected 2", **wrong)

    def test_dtypes(self, kernel, case, bf16_place):
        tables = rotary_tables(bf16_place, 40, 8, torch.float16)
        refused_whole(kernel, case, "rotary_cos", "torch.float16", "torch.bfloat16", **tables)

    def test_too_few_rows(self, kernel, case, bf16_place):
        tables = rotary_tables(bf16_place, 32, 8)
        refused_whole(
            kernel, case, "cache_seqlens is 30", "have 32 rows", **tables, cache_seqlens=30
        )
        if bf16_place["device"].type == "cpu":
            refused_whole(kernel, case, "cache_seqlens[0] is 30", "have 32 rows", **tables)


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ({"softmax_scale": float("nan")}, ("softmax_scale", "nan")),
        ({"softcap": -1.0}, ("softcap", "-1")),
        ({"window_size": (-2, 0)}, ("window_size", "(-2, 0)")),
        ({"window_size": (1, 2, 3)}, ("window_size", "two entries")),
        ({"num_splits": -1}, ("num_splits", "-1")),
        ({"num_splits": 1.5}, ("num_splits", "1.5")),
        (
            {"num_splits": 2**31},
            ("num_splits", "2147483648", "between 0 (own choice) and 2147483647"),
        ),
        ({"causal": "yes"}, ("causal", "yes")),
        ({"rotary_interleaved": 2.5}, ("rotary_interleaved", "2.5")),
        ({"alibi_slopes": torch.zeros(3)}, ("alibi_slopes", "(3,)")),
        ({"s_aux": torch.zeros(3)}, ("s_aux", "(3,)")),
    ],
    ids=str,
)
def test_options(kernel, case, option, parts):
    device = case["q"].device
    option = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in option.items()}
    refused_whole(kernel, case, *parts, **option)


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "v_cache", "s_aux", "alibi_slopes"])
def test_no_gradient(kernel, case, name):
    """It would silently be zero."""
    case["s_aux"] = case["alibi_slopes"] = torch.zeros(4, device=case["q"].device)
    case[name] = case[name].clone().requires_grad_()
    with torch.no_grad():
        kernel.flash_attn_with_kvcache(**case)
    refused(lambda: kernel.flash_attn_with_kvcache(**case), f"{name}.requires_grad", "no_grad()")


def test_a_backward_pass_that_has_saved_the_cache(kernel, case):
    """An append changes what it would read: torch's error for that, not other gradients."""
    q = case["q"].clone().requires_grad_()
    values = {name: case[name].nan_to_num_() for name in ("k_cache", "v_cache")}
    out = kernel.flash_attn_func(q, *values.values())
    kernel.flash_attn_with_kvcache(**{**case, "k": None, "v": None})
    out.sum().backward(retain_graph=True)
    kernel.flash_attn_with_kvcache(**case)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


def test_forward_mode(kernel, case):
    with forward_ad.dual_level():
        q = forward_ad.make_dual(case["q"], torch.ones_like(case["q"]))
        with torch.no_grad(), pytest.raises(NotImplementedError, match="forward-mode"):
            kernel.flash_attn_with_kvcache(**{**case, "q": q})


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("k", lambda k: k[..., :8]),
        ("v", lambda v: v[:, :, :1]),
        ("k_cache", lambda cache: cache[..., :8]),
        ("q", lambda q: q[0]),
        ("v_cache", lambda cache: cache.half()),
        ("v_cache", lambda cache: cache[:1]),
        ("q", lambda q: q[:, :, :3]),
        ("q", lambda q: torch.cat([q] * 40, -1)),
        ("cache_seqlens", lambda lengths: lengths.long()),
        ("cache_seqlens", lambda lengths: lengths[:1]),
    ],
)
def test_meta_tensors(kernel, case, name, changed):
    """They have no values, but shapes and dtypes."""
    meta = {n: value.to("meta") for n, value in case.items()}
    out = kernel.flash_attn_with_kvcache(**meta)
    assert out.shape == case["q"].shape
    refused(lambda: kernel.flash_attn_with_kvcache(**{**meta, name: changed(meta[name])}), name)


@pytest.mark.parametrize("name", ["q", "k_cache", "cache_seqlens", "cache_leftpad"])
def test_no_tensors(kernel, case, name):
    refused(lambda: kernel.flash_attn_with_kvcache(**{**case, name: "x"}), name, "'x' (str)")


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("appends", [False, True])
def test_missing_tensors(kernel, case, name, appends):
    case = {**case, name: None} if appends else {**case, name: None, "k": None, "v": None}
    refused(lambda: kernel.flash_attn_with_kvcache(**case), f"{name} is None", "torch.Tensor")


@pytest.mark.parametrize("value", [True, False, 3.0, [3, 4], "3", torch.tensor(True)], ids=str)
def test_lengths_that_are_no_int(kernel, case, value):
    said = "cache_seqlens is", "it must be an int or "
    refused_whole(kernel, case, *said, cache_seqlens=value)


@pytest.mark.parametrize("append", [False, True], ids=["read", "append"])
def test_every_result_flag_before_the_append(kernel, case, append):
    if not append:
        case |= {"k": None, "v": None}
    said = "return_softmax_lse is 'x'", "True or False"
    refused_whole(kernel, case, *said, return_softmax_lse="x")


def test_the_table_by_the_name_that_it_has(kernel, paged):
    table = paged.pop("block_table")
    wrong = table.clone()
    wrong[0, 0] = 99
    for name in ("block_table", "page_table"):
        refused_whole(kernel, paged, f"{name} has dtype", **{name: table.long()})
        refused_whole(kernel, paged, f"{name} has shape", **{name: table[0]})
        refused_whole(kernel, paged, f"{name} is 'x'", **{name: "x"})
        if table.device.type == "cpu":
            refused_whole(kernel, paged, f"{name}[0, 0] is 99", **{name: wrong})


def test_more_than_the_capacity_as_an_int(kernel, case, paged):
    capacity = case["k_cache"].shape[1]
    refused_whole(
        kernel,
        case,
        f"cache_seqlens is {capacity - 2} and k has 3 new rows",
        f"the cache has {capacity} rows for each sequence",
        cache_seqlens=capacity - 2,
    )
    assert paged["block_table"].shape[1] == 6
    refused_whole(
        kernel,
        paged,
        "cache_seqlens is 46 and k has 3 new rows",
        "the page table has room for 48 (6 pages of 8)",
        cache_seqlens=46,
    )
    refused_whole(
        kernel, case, f"cache_seqlens is {capacity + 1}", cache_seqlens=capacity + 1, k=None, v=None
    )
    refused_whole(kernel, case, "cache_seqlens is -1", "at least 0", cache_seqlens=-1)
    case |= {name: case[name][:, :1] for name in ("k", "v")}
    refused_whole(kernel, case, "and k has 1 new row, but", cache_seqlens=capacity)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def checked_place(request, kernel):
    """Where index values are checked: on the CPU, and on a GPU when that is asked for."""
    kernel.check_inputs(request.param == "cuda")
    yield {"device": torch.device(request.param), "dtype": torch.bfloat16}
    kernel.check_inputs(False)


class TestValues:
    def test_lengths(self, kernel, checked_place):
        case = make_case(checked_place, [30, 9], 2, 3)
        lengths = lengths_tensor([30, 34], checked_place)
        refused_whole(
            kernel, case, "cache_seqlens[1] is 34 and k has 3 new rows", cache_seqlens=lengths
        )
        case = make_case(checked_place, [30, 9], 2)
        lengths = lengths_tensor([37, 9], checked_place)
        refused_whole(kernel, case, "cache_seqlens[0] is 37, but", cache_seqlens=lengths)

    def test_a_page_table_that_is_too_short(self, kernel, checked_place):
        """Dao-AILab/flash-attention#2711."""
        for lengths, new, said in (([600], 0, "600, but"), ([510], 8, "510 and k has 8 new rows")):
            case = make_case(checked_place, [0], 1, new, page_size=256)
            case["block_table"] = torch.zeros_like(case["block_table"])[:, :1].repeat(1, 2)
            case["block_table"][0, 1] = 1
            case["cache_seqlens"] = lengths_tensor(lengths, checked_place)
            room = "the page table has room for 512 (2 pages of 256)"
            refused_whole(kernel, case, f"cache_seqlens[0] is {said}", room)

    def test_pages(self, kernel, checked_place):
        case = make_case(checked_place, [30, 9], 2, 3, page_size=8)
        for wrong in (-1, case["k_cache"].shape[0], 2**31 - 1):
            table = case["block_table"].clone()
            table[1, 1] = wrong
            refused_whole(kernel, case, f"block_table[1, 1] is {wrong}", block_table=table)

    def test_rows_of_the_cache(self, kernel, checked_place):
        case = make_case(checked_place, [30, 9], 2, 3, shuffled=True)
        for wrong in (-1, 4):
            index = lengths_tensor([0, wrong], checked_place)
            refused_whole(kernel, case, f"cache_batch_idx[1] is {wrong}", cache_batch_idx=index)

    def test_left_padding(self, kernel, checked_place):
        case = make_case(checked_place, [30, 9], 2, 3)
        for wrong in (-1, 13):
            index = lengths_tensor([0, wrong], checked_place)
            refused_whole(kernel, case, f"cache_leftpad[1] is {wrong}", cache_leftpad=index)

    def test_packed(self, kernel, checked_place):
        inputs = make_packed(checked_place, [2, 3], [20, 9])
        inputs["block_table"] = random_pages([20, 9], 8, checked_place)
        for name in ("k", "v"):
            inputs[name] = torch.zeros(9, 8, 2, 64, **checked_place)

        def call(**changes):
            return lambda: kernel.flash_attn_varlen_func(
                **{**inputs, **changes}, max_seqlen_q=3, max_seqlen_k=20
            )

        call()()
        wrong = lengths_tensor([0, 20, 60], checked_place)
        room = inputs["block_table"].shape[1] * 8
        refused(
            call(cu_seqlens_k=wrong),
            "cu_seqlens_k, the length of sequence[1] is 40",
            f"room for {room}",
        )
        wrong = lengths_tensor([0, 20, 9], checked_place)
        refused(call(cu_seqlens_k=wrong), "cu_seqlens_k decreases at index 2")
        refused(call(cu_seqlens_q=wrong), "cu_seqlens_q decreases at index 2")
        refused(call(cu_seqlens_k=wrong[:2]), "cu_seqlens_k", "batch_size + 1 = 3")
        refused(call(dropout_p=0.1), "dropout_p", "block_table")
        refused(call(k=inputs["k"].half()), "k has dtype torch.float16")
        refused(call(v=inputs["v"][:, :1]), "k has shape", "and v has shape")
        refused(call(k=inputs["k"][0]), "k has shape", "expected 4")
        for name in ("q", "k", "v"):
            refused(call(**{name: None}), f"{name} is None", "torch.Tensor")
        refused(call(attn_bias=torch.zeros(1, 1, 20)), "attn_bias", "block_table")
        refused(call(q=inputs["q"].clone().requires_grad_()), "q.requires_grad", "block_table")


class TestFloat8:
    @pytest.fixture
    def float8(self, case):
        return {
            **case,
            **{name: case[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")},
        }

    @pytest.mark.parametrize(
        "dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str
    )
    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    def test_other_float8(self, kernel, float8, name, dtype):
        wrong = float8[name].float().to(dtype)
        refused_whole(
            kernel, float8, f"{name} has dtype {dtype}", "torch.float8_e4m3fn", **{name: wrong}
        )

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    def test_bytes(self, kernel, float8, name):
        wrong = float8[name].view(torch.uint8)
        cure = f"{name}.view(torch.float8_e4m3fn)"
        said = (f"{name} has dtype torch.uint8", cure)
        refused_whole(kernel, float8, *said, **{name: wrong})
        meta = {n: value.to("meta") for n, value in {**float8, name: wrong}.items()}
        refused(lambda: kernel.flash_attn_with_kvcache(**meta), *said)
        kernel.flash_attn_with_kvcache(**{**float8, name: wrong.view(torch.float8_e4m3fn)})

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    def test_one_cache_alone(self, kernel, case, float8, name):
        refused_whole(kernel, float8, "must have one dtype", **{name: case[name]})

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_float8_elsewhere(self, kernel, case, float8, name):
        wrong = float8[name].to(torch.float8_e4m3fn)
        text = f"{name} has dtype torch.float8_e4m3fn"
        refused_whole(kernel, float8, "dtype torch.float8_e4m3fn", **{name: wrong})
        if name == "q":
            both = {other: float8[other].to(torch.float8_e4m3fn) for other in ("q", "k", "v")}
            refused_whole(kernel, float8, text, "torch.bfloat16", **both)
            refused_whole(kernel, case, text, "only a cache may be float8", q=both["q"])

    @pytest.mark.parametrize("name", ["k_descale", "v_descale"])
    def test_descale(self, kernel, case, float8, name, bf16_place):
        device = bf16_place["device"]
        for value in (1.0, torch.ones(2, device=device)):
            text = f"{name} is given, but {name[0]}_cache has dtype torch.bfloat16"
            refused_whole(kernel, case, text, "pass None", **{name: value})
        for value in (0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-39):
            refused_whole(kernel, float8, f"{name} is ", "positive", **{name: value})
        for value in ("1", True, [1.0, 1.0]):
            refused_whole(kernel, float8, name, **{name: value})
        for shape in ((1,), (3,), (2, 3), (1, 2), (2, 2, 1)):
            wrong = torch.ones(shape, device=device)
            refused_whole(
                kernel, float8, f"{name} has shape {shape}", "(num_heads_kv,)", **{name: wrong}
            )
        wrong = torch.ones(2, device=device, dtype=torch.bfloat16)
        refused_whole(kernel, float8, f"{name} has dtype torch.bfloat16", **{name: wrong})
        wrong = torch.ones(2, device=device, requires_grad=True)
        refused_whole(kernel, float8, f"{name}.requires_grad is True", **{name: wrong})

    @pytest.mark.parametrize("name", ["k_descale", "v_descale"])
    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_values_of_a_descale(self, kernel, name, value):
        """On the CPU, or where checks are on."""
        place = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
        case = make_case(place, [30, 9], 2, 3, heads=(4, 2), head_dim=16)
        case |= {other: case[other].to(torch.float8_e4m3fn) for other in ("k_cache", "v_cache")}
        wrong = torch.tensor([1.0, value])
        refused_whole(kernel, case, f"{name} has the value", "positive", **{name: wrong})

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["k_descale", "v_descale"])
    def test_device_of_a_descale(self, kernel, name):
        place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
        case = make_case(place, [30, 9], 2, 3, heads=(4, 2), head_dim=16)
        case |= {other: case[other].to(torch.float8_e4m3fn) for other in ("k_cache", "v_cache")}
        for wrong in (torch.ones(2), torch.tensor(1.0)):
            refused_whole(kernel, case, f"{name} is on cpu", **{name: wrong})

    def test_memory_that_is_written(self, kernel, float8):
        memory = float8["k_cache"].view(torch.uint8).view(-1)[:8]
        wrong = memory.view(torch.float32)
        refused_whole(kernel, float8, "v_descale shares memory with k_cache", v_descale=wrong)
