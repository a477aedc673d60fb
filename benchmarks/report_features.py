"""Tables of what features of attention cost and of packed sequences, from their records."""

from benchmarks.report_models import markdown_table, read_figures

# Which kernels a call runs on Hopper, both passes; all others run Hopper's own.
PORTABLE = ("dropout", "attn_bias")


def kernels_of(feature: str) -> str:
    return "portable" if feature.startswith(PORTABLE) else "Hopper"


def features_table(figures: list) -> str:
    """Milliseconds of each pass, a row for each feature and head dim."""
    times: dict = {}
    for f in figures:
        if "feature" in f:
            row = times.setdefault((f["feature"], f["head_dim"]), {})
            row[f["pass"]] = f"{f['flash_attn_norm_ms']:.2f}"
    rows = []
    for (feature, head_dim), row in times.items():
        name = feature if head_dim == 128 else f"{feature}, head dim {head_dim}"
        rows.append([name, kernels_of(feature), row["forward"], row["backward"]])
    return markdown_table(["feature", "kernels", "forward", "backward"], rows)


def heads_text(heads: tuple) -> str:
    num_heads_q, num_heads_kv, head_dim = heads
    shared = "" if num_heads_q == num_heads_kv else f" on {num_heads_kv}"
    return f"{head_dim}, {num_heads_q}{shared} heads"


def packed_cell(figure: dict) -> str:
    names = [name for name in ("portable", "flash_attn_norm", "dense") if f"{name}_us" in figure]
    times = [figure[f"{name}_us"] for name in names]
    return " / ".join(f"{time:.0f}" if time >= 20 else f"{time:.1f}" for time in times)


def packed_table(figures: list) -> str:
    """Microseconds: our portable kernels, ours and, of sequences of one length, ours on the same
    ones as a dense batch."""
    cells = {
        (f["lengths"], (f["num_heads_q"], f["num_heads_kv"], f["head_dim"])): f for f in figures
    }
    heads = list(dict.fromkeys(key[1] for key in cells))
    rows = [
        [lengths, *(packed_cell(cells[lengths, each]) for each in heads)]
        for lengths in dict.fromkeys(key[0] for key in cells)
    ]
    return markdown_table(["sequences", *map(heads_text, heads)], rows)


def features_tables() -> dict:
    """By its mark in docs/performance.md."""
    return {"attention: features": features_table(read_figures("attention_features_cuda"))}


def packed_tables() -> dict:
    """By its mark in docs/attention_sm90.md."""
    return {"packed sequences": packed_table(read_figures("attention_packed_cuda"))}
