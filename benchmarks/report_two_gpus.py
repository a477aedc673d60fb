"""Draws benchmarks/results/two_gpus.json and prints its tables as Markdown.

    python -m benchmarks.report_two_gpus

writes docs/plots/ring_timeline.png and prints the tables of docs/distributed.md.
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report import PLOTS, markdown_table, read_figures

KINDS = ("attention", "merge", "communication")
# How the document names the runs.
RUNS = {
    "ours": "ours",
    "torch": "torch",
    "ddp": "ours, DDP",
    "fsdp2": "ours, FSDP2",
    "tp": "ours, tensor parallel",
    "ours_again": "ours, again",
    "torch_again": "torch, again",
}
FIGURES_OF_A_RUN = (("peak_gb", 1), ("first_loss", 4), ("last_loss", 4))  # and their digits


def training_table(figures: list) -> str:
    """Of each run, and how far its losses lie from those of the run it is compared with."""
    differences = {f["difference"].split(" - ")[0]: f for f in figures if "difference" in f}
    rows = []
    for figure in (f for f in figures if "run" in f):
        cells = [RUNS[figure["run"]], str(figure["gpus"]), str(figure["tokens_per_s"])]
        cells += [f"{figure[key]:.{digits}f}" for key, digits in FIGURES_OF_A_RUN]
        apart = differences.get(figure["run"])
        if apart is None:
            cells += [""] * 4
        else:
            cells.append(RUNS[apart["difference"].split(" - ")[1]])
            keys = ("at_step_1", "root_mean_square", "largest")
            cells += [f"{round(apart[key], 4) + 0.0:.4f}" for key in keys]  # + 0.0: no -0.0000
        rows.append(cells)
    header = ["run", "GPUs", "tokens/s", "GB on a GPU", "loss of step 1", "of the last ten"]
    return markdown_table([*header, "compared with", "step 1", "root mean square", "largest"], rows)


def ring_table(figures: list) -> str:
    """Without the share of the communication that is hidden: that is the difference of two long
    times over a short one, and two runs do not agree on it."""
    rows = [
        [
            f"{f['tokens']}, {f['sequences']}",
            f["pass"].replace("_", " "),
            f"{f['one_gpu_ms']:.2f}",
            f"{f['ring_ms']:.2f}",
            f"{f['over_one_gpu']:.2f}",
            f"{f['attention_alone_ms']:.2f}",
            f"{f['ring_ms'] - f['attention_alone_ms']:.2f}",
            f"{f['communication_alone_ms']:.2f}",
            f"{f['one_gpu_peak_gb']:.2f}, {f['ring_peak_gb']:.2f}",
        ]
        for f in figures
        if "ring_ms" in f
    ]
    header = ["tokens, sequences", "pass", "one GPU, ms", "ring, ms", "times as fast"]
    header += ["its steps alone, ms", "ring less these, ms", "its shifts alone, ms"]
    return markdown_table([*header, "GB: one GPU, ring"], rows)


def timeline_table(figures: list) -> str:
    """What each kind took in one pass, and how much of the communication ran beside attention."""
    spans = {
        kind: [(f["start_us"], f["end_us"]) for f in figures if f.get("kind") == kind]
        for kind in KINDS
    }
    beside = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in spans["communication"]
        for other_start, other_end in spans["attention"]
    )
    lasted = [sum(end - start for start, end in spans[kind]) for kind in KINDS]
    whole = max(end for kind in KINDS for _, end in spans[kind])
    header = ["whole pass, ms", *KINDS, "communication beside attention"]
    return markdown_table(header, [[f"{us / 1e3:.2f}" for us in (whole, *lasted, beside)]])


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
    axis.set_xlabel("ms from the first kernel on")
    tokens = stretches[0]["tokens"] if stretches else 0
    title = (
        f"Ring attention over two GPUs, {tokens} tokens, forward and backward: one GPU's kernels"
    )
    axis.set_title(title, fontsize=9)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    figure.savefig(PLOTS / "ring_timeline.png", dpi=110)


def tables() -> list:
    """The tables of the document, as they stand there."""
    figures = read_figures("two_gpus")
    return [training_table(figures), ring_table(figures), timeline_table(figures)]


def main() -> None:
    PLOTS.mkdir(parents=True, exist_ok=True)
    plot_timeline(read_figures("two_gpus"))
    print(*tables(), sep="\n\n")


if __name__ == "__main__":
    main()
