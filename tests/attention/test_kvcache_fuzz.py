"""Random calls with a key-value cache, all arguments together. Each run draws other calls; a
failure names the seed, and KVCACHE_SEED=<seed> repeats that call alone."""

import os
import random

import pytest
import torch

from .kvcache_comparison import check, make_case, rotary_tables

CALLS = 40  # of each device and dtype


def draw_call(place, choose: random.Random) -> tuple[dict, dict, dict]:
    """Arguments, what else goes to ours and the reference, and what goes to ours alone."""
    new = choose.choice([0, 0, 1, 1, 2, 7])
    batch_size = choose.randint(1, 5)
    edges = [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    lengths = [choose.choice([*edges, choose.randint(0, 700)]) for _ in range(batch_size)]
    page_size = choose.choice([None, None, 1, 2, 3, 7, 16, 64, 100, 256])
    num_heads_kv = choose.choice([1, 2, 3])
    heads = (num_heads_kv * choose.choice([1, 1, 2, 3, 4, 7, 8]), num_heads_kv)
    dims = choose.choice([(64, 64), (128, 128), (16, 80), (72, 40), (46, 46), (192, 128), (96, 5)])
    seqlen_q = choose.choice([1, 1, 1, 2, 3, 8, 17, 70])
    leftpad = None
    if choose.random() < 0.3:
        leftpad = [choose.randint(0, length) for length in lengths]
    elif choose.random() < 0.3:
        lengths[0] = -1
    shuffled = page_size is None and choose.random() < 0.4
    case = make_case(
        place, lengths, seqlen_q, new, heads, *dims, page_size, leftpad, shuffled=shuffled
    )
    device = place["device"]
    options = {"causal": choose.random() < 0.6, "softcap": choose.choice([0.0, 0.0, 7.0])}
    if choose.random() < 0.4:
        bounds = [-1, 0, 5, 40, 200]
        options["window_size"] = (choose.choice(bounds), choose.choice(bounds))
    if choose.random() < 0.3:
        shape = choose.choice([(heads[0],), (batch_size, heads[0])])
        case["alibi_slopes"] = torch.rand(shape, device=device)
    if choose.random() < 0.3:
        case["s_aux"] = torch.randn(heads[0], device=device)
    if new and choose.random() < 0.5:
        rotary_dim = 2 * choose.randint(1, dims[0] // 2)
        dtype = choose.choice([place["dtype"], torch.float32])
        case |= rotary_tables(place, max(0, *lengths) + max(new, seqlen_q), rotary_dim, dtype)
        options["rotary_interleaved"] = choose.random() < 0.5
    return case, options, {"num_splits": choose.choice([0, 0, 0, 1, 2, 5, 100])}


def seeds() -> list[int]:
    if "KVCACHE_SEED" in os.environ:
        return [int(os.environ["KVCACHE_SEED"])]
    return [random.SystemRandom().randrange(2**32) for _ in range(CALLS)]


def test_random_calls(kernel, place):
    for seed in seeds():
        torch.manual_seed(seed)
        call = None
        try:
            call = draw_call(place, random.Random(seed))
            check(kernel, call[0], call[2], **call[1])
        except Exception as error:
            shapes = {n: tuple(x.shape) for n, x in call[0].items()} if call else {}
            lengths = call[0]["cache_seqlens"].tolist() if call else []
            pytest.fail(f"KVCACHE_SEED={seed}: {error}\n{shapes}, {lengths}, {call and call[1:]}")
