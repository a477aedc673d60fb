"""Draws benchmarks/results/two_gpus.json and prints its tables as Markdown.

    python -m benchmarks.report_two_gpus

writes docs/plots/ring_timeline.png and prints the tables of docs/distributed.md.
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report import PLOTS, read_figures

KINDS = ("attention", "merge", "communication")


def training_table(figures: list) -> str:
    differences = {f["difference"]: f for f in figures if "difference" in f}
    lines = [
        "| run | GPUs | tokens/s | GB per GPU | last loss | largest difference, root mean square |",
        "|---|---|---|---|---|---|",
    ]
    for figure in (f for f in figures if "run" in f):
        name = figure["run"]
        found = [d for key, d in differences.items() if key.startswith(f"{name} - ")]
        gap = "" if not found else f"{found[0]['largest']:.4f}, {found[0]['root_mean_square']:.4f}"
        other = "" if not found else f" (to {found[0]['difference'].split(' - ')[1]})"
        lines.append(
            f"| {name} | {figure['gpus']} | {figure['tokens_per_s']:,} | {figure['peak_gb']:.1f} "
            f"| {figure['last_loss']:.4f} | {gap}{other} |"
        )
    return "\n".join(lines)


def ring_table(figures: list) -> str:
    lines = [
        "| tokens, sequences | pass | ring, ms | its attention | its communication | hidden "
        "| one GPU, ms | times as fast | GB: ring, one GPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for f in (f for f in figures if "ring_ms" in f):
        lines.append(
            f"| {f['tokens']}, {f['sequences']} | {f['pass'].replace('_', ' ')} "
            f"| {f['ring_ms']:.2f} | {f['attention_alone_ms']:.2f} "
            f"| {f['communication_alone_ms']:.2f} | {f['share_of_communication_hidden']:.0%} "
            f"| {f['one_gpu_ms']:.2f} | {f['over_one_gpu']:.2f} "
            f"| {f['ring_peak_gb']:.2f}, {f['one_gpu_peak_gb']:.2f} |"
        )
    return "\n".join(lines)


def plot_timeline(figures: list) -> None:
    stretches = [f for f in figures if "timeline_of" in f]
    figure, axis = plt.subplots(figsize=(10, 2.4), layout="constrained")
    for row, kind in enumerate(KINDS):
        bars = [
            (f["start_us"] / 1e3, (f["end_us"] - f["start_us"]) / 1e3)
            for f in stretches
            if f["kind"] == kind
        ]
        axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=f"C{row}")
    axis.set_yticks(range(len(KINDS)), KINDS)
    axis.set_xlabel("ms")
    tokens = stretches[0]["tokens"] if stretches else 0
    axis.set_title(f"Ring attention over two GPUs, {tokens} tokens: one GPU's kernels", fontsize=9)
    figure.savefig(PLOTS / "ring_timeline.png", dpi=110)


def main() -> None:
    figures = read_figures("two_gpus")
    PLOTS.mkdir(parents=True, exist_ok=True)
    plot_timeline(figures)
    print(training_table(figures), ring_table(figures), sep="\n\n")


if __name__ == "__main__":
    main()
