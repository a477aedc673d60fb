"""Draws the records in benchmarks/results/ and prints their tables as Markdown.

    python -m benchmarks.report

writes docs/plots/attention_cuda.png, norms_cuda.png and training_cuda.png and prints the tables of
docs/performance.md and docs/norms.md.
"""

import json
import math
from pathlib import Path
from typing import Optional

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.fa3_yardstick import LEAST_SEQLEN_THROUGH_CUDNN, over_fa3_through_cudnn

ROOT = Path(__file__).resolve().parent.parent
PLOTS = ROOT / "docs" / "plots"
MIN_ROWS = 1024  # fewer rows are bound by the launch, not by memory


def read_figures(name: str) -> list:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["figures"]


def attention_settings(figures: list) -> list:
    """(head_dim, num_heads_q, num_heads_kv, causal) in the record's order."""
    cells = [figure for figure in figures if "seqlen" in figure and "over_flash" in figure]
    keys = [(f["head_dim"], f["num_heads_q"], f["num_heads_kv"], f["causal"]) for f in cells]
    return list(dict.fromkeys(keys))


def select(figures: list, setting: tuple, name: str) -> list:
    names = ("head_dim", "num_heads_q", "num_heads_kv", "causal")
    return [
        figure
        for figure in figures
        if figure.get("pass") == name
        and "over_flash" in figure
        and tuple(figure[key] for key in names) == setting
    ]


def setting_text(setting: tuple) -> str:
    head_dim, num_heads_q, num_heads_kv, causal = setting
    return f"{head_dim}, {num_heads_q}/{num_heads_kv}, {'causal' if causal else 'full'}"


def cell_text(figure: Optional[dict]) -> str:
    if figure is None:
        return ""
    text = f"{figure['flash_attn_norm_tflop_per_s']:.0f}, x{figure['over_flash']:.2f}"
    if "over_fa3_quoted" in figure:
        text += f", x{figure['over_fa3_quoted']:.2f}"
    return text


def attention_table(figures: list) -> str:
    """TFLOP/s, the ratio to torch's flash backend and, where it is known, to FlashAttention-3's
    quoted figure; one row per setting and pass."""
    settings = attention_settings(figures)
    seqlens = sorted({f["seqlen"] for f in figures if "over_flash" in f})
    lines = [
        "| head dim, heads q/kv, mask | pass | " + " | ".join(map(str, seqlens)) + " |",
        "|---|---|" + "---|" * len(seqlens),
    ]
    for setting in settings:
        for name in ("forward", "backward"):
            by_seqlen = {f["seqlen"]: f for f in select(figures, setting, name)}
            cells = [cell_text(by_seqlen.get(seqlen)) for seqlen in seqlens]
            lines.append(f"| {setting_text(setting)} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean_text(ratios: list) -> str:
    """The geometric mean, and the least in brackets."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.3f} ({min(ratios):.3f})"


def means_table(figures: list) -> str:
    """Geometric means of the ratios: over all lengths, and from 4096, where what torch does on the
    host weighs nothing. Through cuDNN only there."""
    peers = ["flash", "cudnn", "portable", "fa3_quoted", "fa3_through_cudnn"]
    lines = [
        "| pass, seqlen, heads | " + " | ".join(peers) + " |",
        "|---|" + "---|" * len(peers),
    ]
    for name in ("forward", "backward"):
        cells = [f for f in figures if f.get("pass") == name and "over_flash" in f]
        for cell in cells:
            through_cudnn = over_fa3_through_cudnn(cell, name)
            if through_cudnn is not None:
                cell["over_fa3_through_cudnn"] = through_cudnn
        for least in (512, LEAST_SEQLEN_THROUGH_CUDNN):
            for heads in ("all", "without GQA", "GQA"):
                mine = [
                    f
                    for f in cells
                    if f["seqlen"] >= least
                    and (
                        heads == "all"
                        or (f["num_heads_q"] == f["num_heads_kv"]) != (heads == "GQA")
                    )
                ]
                ratios = [[f[f"over_{p}"] for f in mine if f"over_{p}" in f] for p in peers]
                if least < LEAST_SEQLEN_THROUGH_CUDNN:
                    ratios[-1] = []
                texts = " | ".join(mean_text(values) if values else "" for values in ratios)
                lines.append(f"| {name}, from {least}, {heads} | {texts} |")
    return "\n".join(lines)


def plot_attention(figures: list) -> None:
    settings = [s for s in attention_settings(figures) if s[1] == s[2]]
    head_dims = list(dict.fromkeys(setting[0] for setting in settings))
    figure, axes = plt.subplots(2, len(head_dims), figsize=(4 * len(head_dims), 7), sharey=True)
    for column, head_dim in enumerate(head_dims):
        for row, name in enumerate(("forward", "backward")):
            axis = axes[row][column]
            for setting in (s for s in settings if s[0] == head_dim):
                cells = select(figures, setting, name)
                style = "--" if setting[3] else "-"
                mask = "causal" if setting[3] else "full"
                for who, color in (("flash_attn_norm", "C0"), ("flash", "C1"), ("cudnn", "C7")):
                    axis.plot(
                        [f["seqlen"] for f in cells],
                        [f[f"{who}_tflop_per_s"] for f in cells],
                        style,
                        color=color,
                        marker=".",
                        label=f"{who}, {mask}",
                    )
            axis.set_xscale("log", base=2)
            axis.set_title(f"{name}, head dim {head_dim}")
            axis.set_xlabel("seqlen")
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("TFLOP/s")
        axes[1][0].set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=7, handlelength=4)
    figure.tight_layout()
    figure.savefig(PLOTS / "attention_cuda.png", dpi=110)


def norms_table(figures: list) -> str:
    """The share of the stream's bandwidth and Liger's time over ours, one row per shape."""
    cells = [f for f in figures if f.get("rows", 0) >= MIN_ROWS]
    columns = list(dict.fromkeys((f["norm"], f["pass"]) for f in cells))
    by_cell = {(f["rows"], f["hidden_size"], (f["norm"], f["pass"])): f for f in cells}
    lines = [
        "| rows x hidden size | " + " | ".join(f"{norm} {name}" for norm, name in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for rows, hidden_size in dict.fromkeys((f["rows"], f["hidden_size"]) for f in cells):
        mine = [by_cell.get((rows, hidden_size, column)) for column in columns]
        shares = [
            f"{f['of_roof']:.2f}, x{f['liger_us'] / f['flash_attn_norm_us']:.2f}" if f else ""
            for f in mine
        ]
        lines.append(f"| {rows} x {hidden_size} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def plot_norms(figures: list) -> None:
    cells = [f for f in figures if f.get("rows", 0) >= MIN_ROWS]
    norms = list(dict.fromkeys(f["norm"] for f in cells))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, name in zip(axes, ("forward", "backward")):
        for norm in norms:
            mine = [f for f in cells if f["norm"] == norm and f["pass"] == name]
            labels = [f"{f['rows']} x {f['hidden_size']}" for f in mine]
            axis.plot(labels, [f["of_roof"] for f in mine], marker="o", label=norm)
        axis.set_title(name)
        axis.tick_params(axis="x", rotation=30)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of the stream's bandwidth")
    axes[0].set_ylim(0, 1)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(PLOTS / "norms_cuda.png", dpi=110)


def plot_training(figures: list) -> None:
    """The losses of the runs, and how far they lie from the first run with torch's kernels."""
    losses = {f["losses_of"]: f["losses"] for f in figures if "losses_of" in f}
    steps = range(1, len(losses["torch"]) + 1)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for name, color in (("ours", "C0"), ("torch", "C1"), ("torch_again", "C7")):
        axes[0].plot(steps, losses[name], color=color, linewidth=1, label=name)
        if name != "torch":
            distances = [x - y for x, y in zip(losses[name], losses["torch"])]
            axes[1].plot(steps, distances, color=color, linewidth=1, label=f"{name} - torch")
    axes[0].set_title("loss")
    axes[1].set_title("difference of the losses")
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(PLOTS / "training_cuda.png", dpi=110)


def main() -> None:
    PLOTS.mkdir(parents=True, exist_ok=True)
    attention, norms = read_figures("attention_cuda"), read_figures("norms_cuda")
    plot_attention(attention)
    plot_norms(norms)
    plot_training(read_figures("training_cuda"))
    print(attention_table(attention), means_table(attention), norms_table(norms), sep="\n\n")


if __name__ == "__main__":
    main()
