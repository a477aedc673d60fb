"""Draws the records in benchmarks/results/ and prints their tables as Markdown.

    python -m benchmarks.report

writes docs/plots/attention_cuda.png, norms_cuda.png, training_cuda.png and prints the two tables
of attention in docs/performance.md, the three of norms on a GPU in docs/norms.md and those with a
mark in the documents (features, packed sequences, whole models, all on a CPU). `--write` puts the
latter there.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Optional

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import report_cpu, report_features, report_models
from benchmarks.fa3_yardstick import LEAST_SEQLEN_THROUGH_CUDNN, over_fa3_through_cudnn
from benchmarks.report_models import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PLOTS = ROOT / "docs" / "plots"
MIN_ROWS = 1024  # fewer rows are bound by the launch, not by memory

ATTENTION_PEERS = {
    "flash": "torch flash",
    "cudnn": "torch cuDNN",
    "portable": "our portable kernels",
    "fa3_quoted": "FlashAttention-3, quoted",
    "fa3_through_cudnn": "FlashAttention-3, through cuDNN",
}
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm", "add_rms": "add + RMSNorm"}
NORM_PEERS = {
    "liger": "Liger",
    "torch_compile": "torch.compile",
    "torch": "torch's own functions",
}
PASSES = ("forward", "backward")


def read_record(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def read_figures(name: str) -> list:
    return read_record(name)["figures"]


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
    seqlens = sorted({f["seqlen"] for f in figures if "over_flash" in f})
    rows = []
    for setting in attention_settings(figures):
        for name in PASSES:
            by_seqlen = {f["seqlen"]: f for f in select(figures, setting, name)}
            cells = [cell_text(by_seqlen.get(seqlen)) for seqlen in seqlens]
            rows.append([setting_text(setting), name, *cells])
    return markdown_table(["head dim, heads q/kv, mask", "pass", *map(str, seqlens)], rows)


def mean_text(ratios: list, peer: str) -> str:
    """The geometric mean, and the least in brackets; a digit more where the ratios are near 1."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    digits = 3 if peer.startswith("fa3") else 2
    return f"{mean:.{digits}f} ({min(ratios):.{digits}f})"


def is_among(cell: dict, heads: str) -> bool:
    is_grouped = cell["num_heads_q"] != cell["num_heads_kv"]
    return heads == "all" or is_grouped == (heads == "GQA")


def means_table(figures: list) -> str:
    """Geometric means of the ratios: over all lengths, and from 4096, where what torch does on the
    host weighs nothing. Through cuDNN only there."""
    rows = []
    for name in PASSES:
        cells = [dict(f) for f in figures if f.get("pass") == name and "over_flash" in f]
        for cell in cells:
            through_cudnn = over_fa3_through_cudnn(cell, name)
            if through_cudnn is not None:
                cell["over_fa3_through_cudnn"] = through_cudnn
        for least, lengths in ((0, "all"), (LEAST_SEQLEN_THROUGH_CUDNN, None)):
            for heads in ("all", "as many KV heads", "GQA"):
                if lengths is None and heads == "all":
                    continue
                mine = [f for f in cells if f["seqlen"] >= least and is_among(f, heads)]
                texts = [f"{name}, {lengths or f'from {least}'}, {heads}"]
                for peer in ATTENTION_PEERS:
                    ratios = [f[f"over_{peer}"] for f in mine if f"over_{peer}" in f]
                    is_known = ratios and not (lengths and peer == "fa3_through_cudnn")
                    texts.append(mean_text(ratios, peer) if is_known else "")
                rows.append(texts)
    return markdown_table(["pass, lengths, heads", *ATTENTION_PEERS.values()], rows)


def plot_attention_cell(axis: plt.Axes, figures: list, setting: tuple, name: str) -> None:
    """One setting and pass: lines for what was measured in this run, marks for what is quoted."""
    cells = select(figures, setting, name)
    mask = "causal" if setting[3] else "full"
    measured = (
        ("flash_attn_norm", "flash_attn_norm", "C0"),
        ("flash", "torch flash (FA2)", "C1"),
        ("cudnn", "torch cuDNN", "C7"),
    )
    for key, label, color in measured:
        axis.plot(
            [f["seqlen"] for f in cells],
            [f[f"{key}_tflop_per_s"] for f in cells],
            "--" if setting[3] else "-",
            color=color,
            marker=".",
            label=f"{label}, {mask}",
        )
    quoted = [f for f in cells if "fa3_quoted_tflop_per_s" in f]
    axis.plot(
        [f["seqlen"] for f in quoted],
        [f["fa3_quoted_tflop_per_s"] for f in quoted],
        "x" if setting[3] else "o",
        color="C3",
        fillstyle="none",
        label=f"FlashAttention-3 (quoted), {mask}",
    )


def plot_attention(record: dict, folder: Path) -> None:
    figures = record["figures"]
    settings = attention_settings(figures)
    columns = list(dict.fromkeys(setting[:3] for setting in settings))
    seqlens = sorted({f["seqlen"] for f in figures if "over_flash" in f})
    figure, axes = plt.subplots(2, len(columns), figsize=(4 * len(columns), 8), sharey="row")
    for column, (head_dim, heads_q, heads_kv) in enumerate(columns):
        heads = f"{heads_q} heads" if heads_q == heads_kv else f"{heads_q}/{heads_kv} heads (GQA)"
        for row, name in enumerate(PASSES):
            axis = axes[row][column]
            for setting in settings:
                if setting[:3] == columns[column]:
                    plot_attention_cell(axis, figures, setting, name)
            axis.set_xscale("log", base=2)
            axis.set_xticks(seqlens, [str(seqlen) for seqlen in seqlens], fontsize=8)
            axis.set_title(f"{name}, head dim {head_dim}, {heads}", fontsize=10)
            axis.set_xlabel("seqlen")
            axis.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylim(bottom=0)  # last: it ends the scaling to the data
        row[0].set_ylabel("TFLOP/s")
    labels = axes[0][0].get_legend_handles_labels()
    figure.legend(*labels, loc="lower center", ncols=2, handlelength=4, frameon=False)
    figure.suptitle(f"Attention, {record['device']}, bf16, batch size x seqlen = 16384")
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.savefig(folder / "attention_cuda.png", dpi=110)
    plt.close(figure)


def norm_cells(figures: list, is_long: bool) -> dict:
    """Figures of norms by (rows, hidden_size), norm and pass: of many rows or of few."""
    cells: dict = {}
    for f in figures:
        if "rows" in f and (f["rows"] >= MIN_ROWS) == is_long:
            shape = cells.setdefault((f["rows"], f["hidden_size"]), {})
            shape[f["norm"], f["pass"]] = f
    return cells


def share_of_roof(cell: dict, who: str) -> float:
    """Which share of torch.add's bandwidth `who` reaches, by the bytes that the norm moves."""
    return cell["of_roof"] * cell["flash_attn_norm_us"] / cell[f"{who}_us"]


def norm_shares_table(figures: list) -> str:
    """Shares of torch.add's bandwidth; last torch's elementwise kernel of as many tensors."""
    columns = [(norm, name) for norm in NORMS for name in PASSES]
    header = [f"{NORMS[norm]} {name}" if name == "forward" else name for norm, name in columns]
    rows = []
    for (count, hidden_size), cells in norm_cells(figures, is_long=True).items():
        shares = [f"{share_of_roof(cells[column], 'flash_attn_norm'):.2f}" for column in columns]
        plain = [share_of_roof(cells[n, "forward"], "elementwise") for n in ("rms", "add_rms")]
        elementwise = ", ".join(f"{share:.2f}" for share in plain)
        rows.append([f"{count} x {hidden_size}", *shares, elementwise])
    return markdown_table(["rows x hidden size", *header, "elementwise"], rows)


def norm_peers_table(figures: list) -> str:
    """Peers' times over ours, hidden sizes from left to right."""
    shapes = norm_cells(figures, is_long=True).values()
    rows = []
    for peer, label in NORM_PEERS.items():
        for name in PASSES:
            texts = [f"{label}, forward" if name == "forward" else name]
            for norm in NORMS:
                mine = [cells[norm, name] for cells in shapes]
                ratios = [f[f"{peer}_us"] / f["flash_attn_norm_us"] for f in mine]
                texts.append(", ".join(f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in ratios))
            rows.append(texts)
    return markdown_table(["times of peers over ours", *NORMS.values()], rows)


def few_rows_table(figures: list) -> str:
    """Microseconds: ours, and in brackets the fastest peer's."""
    rows = []
    for (count, hidden_size), cells in norm_cells(figures, is_long=False).items():
        texts = [f"{count} x {hidden_size}"]
        for norm in NORMS:
            for name in PASSES:
                cell = cells[norm, name]
                best = min(NORM_PEERS, key=lambda peer: cell[f"{peer}_us"])
                label = "torch" if best == "torch" else NORM_PEERS[best]
                texts.append(f"{cell['flash_attn_norm_us']:.2f} ({label} {cell[f'{best}_us']:.2f})")
        rows.append(texts)
    header = [f"{NORMS[norm]} {n}" if n == "forward" else n for norm in NORMS for n in PASSES]
    return markdown_table(["rows x hidden size", *header], rows)


def plot_norms(record: dict, folder: Path) -> None:
    shapes = norm_cells(record["figures"], is_long=True)
    labels = [f"{rows} x {hidden_size}" for rows, hidden_size in shapes]
    figure, axes = plt.subplots(2, len(NORMS), figsize=(13, 7), sharex=True, sharey=True)
    hollow = {"ls": "", "fillstyle": "none", "zorder": 3}  # seen on top of our points, too
    styles = {
        "flash_attn_norm": {"label": "flash_attn_norm", "color": "C0", "marker": "o", "ls": ""},
        "torch_compile": {"label": "torch.compile", "color": "#808080", "marker": "s", **hollow},
        "liger": {"label": "Liger", "color": "#e8801a", "marker": "^", **hollow},
    }
    for column, (norm, title) in enumerate(NORMS.items()):
        for row, name in enumerate(PASSES):
            axis = axes[row][column]
            cells = [shape[norm, name] for shape in shapes.values()]
            for who, style in styles.items():
                axis.plot(labels, [share_of_roof(cell, who) for cell in cells], **style)
            axis.set_title(f"{title}, {name}", fontsize=10)
            axis.grid(alpha=0.3)
            axis.tick_params(axis="x", rotation=30)
    for row in axes:
        row[0].set_ylabel("share of torch.add's bandwidth")
    axes[1][1].set_xlabel("rows x hidden size")
    axes[0][0].set_ylim(0, 1)
    axes[0][0].legend(loc="lower center")
    figure.suptitle(f"Norms, {record['device']}, bf16")
    figure.tight_layout()
    figure.savefig(folder / "norms_cuda.png", dpi=110)
    plt.close(figure)


def marked_tables() -> dict:
    """{document: {mark: table}}"""
    documents = report_cpu.tables()
    documents["performance.md"].update(report_features.features_tables(), **report_models.tables())
    documents["attention_sm90.md"] = report_features.packed_tables()
    return documents


def tables() -> list:
    """The tables of the documents, as they stand there."""
    attention, norms = read_figures("attention_cuda"), read_figures("norms_cuda")
    return [
        attention_table(attention),
        means_table(attention),
        norm_shares_table(norms),
        norm_peers_table(norms),
        few_rows_table(norms),
        *(table for tables in marked_tables().values() for table in tables.values()),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--plots", type=Path, default=PLOTS, help="folder for the plots, default docs/plots"
    )
    parser.add_argument("--write", action="store_true", help="tables with a mark to the documents")
    parser.add_argument("--tables-only", action="store_true", help="draw nothing")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if not arguments.tables_only:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        plot_attention(read_record("attention_cuda"), arguments.plots)
        plot_norms(read_record("norms_cuda"), arguments.plots)
        report_models.plot_training(read_record("training_cuda"), arguments.plots)
    if arguments.write:
        for name, tables_of_it in marked_tables().items():
            report_models.write_tables(ROOT / "docs" / name, tables_of_it)
    print(*tables(), sep="\n\n")


if __name__ == "__main__":
    main()
