"""FlashAttention-3's speed on an H200: the yardstick of the Hopper kernels.

Measured once, by the method of benchmarks.attention_cuda (bursts after a rest, random
bfloat16, batch_size * seqlen = 16384), with FlashAttention-3 at commit 0251105 built by nvcc 13.0,
torch 2.11.0+cu130. Quoted here because building it takes hours: compare with it as with another
run, to a few percent.
"""

# (head_dim, num_heads_q, num_heads_kv, causal, pass): {seqlen: TFLOP/s}
FA3_TFLOP_PER_S = {
    (128, 16, 16, False, "forward"): {
        512: 533,
        1024: 637,
        2048: 689,
        4096: 712,
        8192: 732,
        16384: 737,
    },
    (128, 16, 16, True, "forward"): {
        512: 330,
        1024: 493,
        2048: 610,
        4096: 683,
        8192: 723,
        16384: 743,
    },
    (256, 8, 8, False, "forward"): {
        512: 538,
        1024: 680,
        2048: 744,
        4096: 769,
        8192: 789,
        16384: 799,
    },
    (256, 8, 8, True, "forward"): {
        512: 340,
        1024: 499,
        2048: 626,
        4096: 717,
        8192: 769,
        16384: 794,
    },
    (64, 32, 32, False, "forward"): {
        512: 332,
        1024: 388,
        2048: 500,
        4096: 525,
        8192: 573,
        16384: 577,
    },
    (64, 32, 32, True, "forward"): {
        512: 227,
        1024: 304,
        2048: 429,
        4096: 490,
        8192: 549,
        16384: 570,
    },
    (128, 16, 16, False, "backward"): {
        512: 360,
        1024: 491,
        2048: 573,
        4096: 623,
        8192: 655,
        16384: 670,
    },
    (128, 16, 16, True, "backward"): {
        512: 191,
        1024: 362,
        2048: 481,
        4096: 571,
        8192: 632,
        16384: 666,
    },
    (256, 8, 8, False, "backward"): {
        512: 295,
        1024: 383,
        2048: 434,
        4096: 465,
        8192: 481,
        16384: 485,
    },
    (256, 8, 8, True, "backward"): {
        512: 176,
        1024: 254,
        2048: 383,
        4096: 442,
        8192: 481,
        16384: 493,
    },
    (64, 32, 32, False, "backward"): {
        512: 331,
        1024: 432,
        2048: 506,
        4096: 553,
        8192: 577,
        16384: 582,
    },
    (64, 32, 32, True, "backward"): {
        512: 195,
        1024: 304,
        2048: 423,
        4096: 511,
        8192: 568,
        16384: 600,
    },
    (128, 32, 8, False, "forward"): {1024: 656, 4096: 715, 16384: 734},
    (128, 32, 8, True, "forward"): {1024: 529, 4096: 700, 16384: 750},
    (128, 32, 8, False, "backward"): {1024: 458, 4096: 614, 16384: 629},
    (128, 32, 8, True, "backward"): {1024: 318, 4096: 545, 16384: 655},
}

# torch's cuDNN backend in the run that measured FlashAttention-3, by the same keys. Ours over
# cuDNN in a later run, times cuDNN over FlashAttention-3 here, depends on neither card's speed.
# From 4096 only: in shorter calls later runs caught more of the time that torch takes on the host.
CUDNN_TFLOP_PER_S = {
    (128, 16, 16, False, "forward"): {
        512: 539,
        1024: 615,
        2048: 652,
        4096: 667,
        8192: 675,
        16384: 678,
    },
    (128, 16, 16, True, "forward"): {
        512: 346,
        1024: 441,
        2048: 518,
        4096: 576,
        8192: 612,
        16384: 632,
    },
    (256, 8, 8, False, "forward"): {
        512: 538,
        1024: 635,
        2048: 695,
        4096: 722,
        8192: 735,
        16384: 740,
    },
    (256, 8, 8, True, "forward"): {
        512: 352,
        1024: 463,
        2048: 546,
        4096: 601,
        8192: 632,
        16384: 653,
    },
    (64, 32, 32, False, "forward"): {
        512: 396,
        1024: 441,
        2048: 468,
        4096: 482,
        8192: 491,
        16384: 494,
    },
    (64, 32, 32, True, "forward"): {
        512: 264,
        1024: 341,
        2048: 399,
        4096: 435,
        8192: 457,
        16384: 471,
    },
    (128, 16, 16, False, "backward"): {
        512: 343,
        1024: 450,
        2048: 523,
        4096: 569,
        8192: 592,
        16384: 599,
    },
    (128, 16, 16, True, "backward"): {
        512: 215,
        1024: 320,
        2048: 413,
        4096: 485,
        8192: 535,
        16384: 585,
    },
    (256, 8, 8, False, "backward"): {
        512: 242,
        1024: 307,
        2048: 358,
        4096: 401,
        8192: 372,
        16384: 369,
    },
    (256, 8, 8, True, "backward"): {
        512: 179,
        1024: 257,
        2048: 323,
        4096: 374,
        8192: 420,
        16384: 410,
    },
    (64, 32, 32, False, "backward"): {
        512: 284,
        1024: 371,
        2048: 428,
        4096: 463,
        8192: 477,
        16384: 482,
    },
    (64, 32, 32, True, "backward"): {
        512: 168,
        1024: 250,
        2048: 327,
        4096: 386,
        8192: 425,
        16384: 456,
    },
    (128, 32, 8, False, "forward"): {1024: 633, 4096: 674, 16384: 684},
    (128, 32, 8, True, "forward"): {1024: 474, 4096: 601, 16384: 651},
    (128, 32, 8, False, "backward"): {1024: 439, 4096: 564, 16384: 538},
    (128, 32, 8, True, "backward"): {1024: 308, 4096: 488, 16384: 579},
}
LEAST_SEQLEN_THROUGH_CUDNN = 4096


def cell_key(cell: dict, which: str) -> tuple:
    return cell["head_dim"], cell["num_heads_q"], cell["num_heads_kv"], cell["causal"], which


def fa3_tflop_per_s(cell: dict, which: str):
    """The quoted speed of a cell of benchmarks.attention_cuda, or None."""
    return FA3_TFLOP_PER_S.get(cell_key(cell, which), {}).get(cell["seqlen"])


def over_fa3_through_cudnn(cell: dict, which: str):
    """Ours over FlashAttention-3, by way of cuDNN in either run; None where that says nothing."""
    fa3 = fa3_tflop_per_s(cell, which)
    if fa3 is None or cell["seqlen"] < LEAST_SEQLEN_THROUGH_CUDNN:
        return None
    return cell["over_cudnn"] * CUDNN_TFLOP_PER_S[cell_key(cell, which)][cell["seqlen"]] / fa3
