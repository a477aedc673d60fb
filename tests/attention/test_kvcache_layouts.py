"""Caches and new rows whose heads come before their rows: the error says how they are expected."""

import pytest

from .kvcache_comparison import make_case
from .test_kvcache_refusals import refused_whole
from .test_refusals import refused


@pytest.mark.parametrize("heads_first", ["caches", "new", "all"])
@pytest.mark.parametrize("place", ["of values", "meta"])
def test_heads_before_rows(kernel, bf16_place, heads_first, place):
    """As torch.nn.functional.scaled_dot_product_attention and Transformers' caches have them."""
    case = make_case(bf16_place, [30, 9], 2, 3, heads=(6, 2), head_dim=16)
    if place == "meta":
        case = {name: tensor.to("meta") for name, tensor in case.items()}
    changed = [] if heads_first == "new" else ["k_cache", "v_cache"]
    changed += [] if heads_first == "caches" else ["k", "v"]
    case |= {name: case[name].transpose(1, 2) for name in changed}
    wrong = "k" if heads_first == "new" else "k_cache"
    refused(
        lambda: kernel.flash_attn_with_kvcache(**case),
        f"it looks transposed, pass {wrong}.transpose(1, 2)"
        if wrong == "k_cache"
        else f"{wrong} looks transposed, pass {wrong}.transpose(1, 2)",
    )


def test_pages_with_heads_before_rows(kernel, bf16_place):
    case = make_case(bf16_place, [30, 9], 2, 3, heads=(6, 2), head_dim=16, page_size=16)
    case |= {name: case[name].transpose(1, 2) for name in ("k_cache", "v_cache")}
    pages = case["k_cache"].shape[0]
    refused_whole(
        kernel,
        case,
        f"k_cache has shape ({pages}, 2, 16, 16), expected (num_pages, page_size, num_heads_kv, ",
        "it looks transposed, pass k_cache.transpose(1, 2)",
    )
    # 12 query heads are a multiple of 4 rows too: the new rows tell.
    case = make_case(bf16_place, [3, 9], 2, 3, heads=(12, 2), head_dim=16, page_size=4)
    case |= {name: case[name].transpose(1, 2) for name in ("k_cache", "v_cache")}
    refused_whole(kernel, case, "k_cache looks transposed, pass k_cache.transpose(1, 2)")
