"""Tables and the plot of whole models, training and generation, from their records on a GPU."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
# How the documents name what the records call otherwise.
CONTENDERS = {
    "ours": "ours",
    "ours, lengths given": "ours, lengths given",
    "torch": "torch, flash",
    "torch_again": "torch, flash, again",
    "torch_cudnn": "torch, cuDNN",
    "torch_rounding": "torch, cuDNN, norms rounding as ours",
    "our_attention": "our attention, torch's norms",
    "our_norms": "our norms, torch's flash attention",
}
ATTENTION = {"ours": "ours", "sdpa": "torch's SDPA", "eager": "eager"}
WAYS = {
    "dynamic": "generate, dynamic cache",
    "static": "generate, static cache",
    "continuous": "generate_batch",
}


def read_figures(name: str) -> list:
    """Those of a record; none where it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else []


def markdown_table(header: list, rows: list) -> str:
    lines = [header, *rows]
    texts = [("| " + " | ".join(line) + " |").replace("|  |", "| |") for line in lines]
    return "\n".join([texts[0], "|" + "---|" * len(header), *texts[1:]])


def speed_table(figures: list) -> str:
    """Tokens per second of training steps; memory in brackets."""
    cells = {(f["speed_of"], f["batch_size"], f["seqlen"]): f for f in figures}
    sizes = list(dict.fromkeys(key[1:] for key in cells))
    rows = []
    for name in dict.fromkeys(key[0] for key in cells):
        found = [cells.get((name, *size)) for size in sizes]
        texts = [f"{f['tokens_per_s']} ({f['activations_gb']:.1f} GB)" if f else "" for f in found]
        rows.append([CONTENDERS[name], *texts])
    return markdown_table(["tokens/s", *(f"{b} x {s}" for b, s in sizes)], rows)


def gradients_table(figures: list) -> str:
    """Relative errors in 1e-3, parameters of one kind together."""
    kinds = [kind for kind in figures[0] if kind != "gradient_error_of"]
    rows = [
        [kind.removeprefix("self_attn.").removeprefix("mlp.")]
        + [f"{1e3 * figure[kind]:.2f}" for figure in figures]
        for kind in kinds
    ]
    names = [CONTENDERS[figure["gradient_error_of"]] for figure in figures]
    return markdown_table(["gradient of", *names], rows)


def curves_table(figures: list) -> str:
    """Of each run: how far its losses lie from those of the first run with torch's kernels, and at
    which share of the steps ours lie where torch's runs do."""
    runs = {f["run"]: f for f in figures if "run" in f}
    differences = {f["difference"]: f for f in figures if "difference" in f}
    within = {f["within_torch"]: f for f in figures if "within_torch" in f}
    rows = []
    for name, run in runs.items():
        texts = [CONTENDERS[name], f"{run['first_loss']:.4f}", f"{run['last_loss']:.4f}"]
        apart = differences.get(f"{name} - torch")
        keys = ("at_step_1", "mean", "root_mean_square", "largest")
        texts += [f"{apart[key]:.5f}" if apart else "" for key in keys]
        share = f"{within[name]['share_of_steps']:.3f}" if name in within else ""
        rows.append([*texts, share])
    header = ["run", "loss of step 1", "of the last ten", "less torch's: step 1", "mean"]
    header += ["root mean square", "largest", "steps within torch's runs"]
    return markdown_table(header, rows)


def generation_table(figures: list) -> str:
    """Tokens per second, and the check of the tokens: last how many of those that must be float32's
    are not. Attention that is wrong on purpose comes last."""
    rows = []
    for f in sorted(figures, key=lambda f: (f["fault"] is not None, f["dtype"] == "float16")):
        name = ATTENTION[f["attention"]] + (f", {f['fault']}" if f["fault"] else "")
        shares = ("share_of_float32", "answers_of_float32", "share_covered")
        rows.append(
            [
                WAYS[f["way"]],
                name,
                f["dtype"],
                "" if f["fault"] else str(f["tokens_per_s"]),
                *(f"{f[share]:.3f}" for share in shares),
                str(f["wrong"]),
            ]
        )
    header = ["way", "attention", "dtype", "tokens/s", "tokens of float32", "whole answers"]
    return markdown_table([*header, "must be float32's", "of these not"], rows)


def tables() -> dict:
    """By the name that marks their place in docs/performance.md; those of the records there are."""
    training = read_figures("training_cuda")
    makers = {
        "training: speed": (speed_table, [f for f in training if "speed_of" in f]),
        "training: gradients": (gradients_table, [f for f in training if "gradient_error_of" in f]),
        "training: losses": (curves_table, training),
        "generation": (generation_table, read_figures("generation_cuda")),
    }
    return {name: make(figures) for name, (make, figures) in makers.items() if figures}


def write_tables(path: Path, tables: dict) -> None:
    """Puts each table behind its mark, in place of the one that stands there."""
    text = path.read_text()
    for name, table in tables.items():
        mark = f"<!-- {name} -->\n"
        before, found, after = text.partition(mark)
        if not found:
            raise SystemExit(f"{path} has no {mark.strip()}")
        text = before + mark + table + "\n" + re.sub(r"\A(\|.*\n)*", "", after)
    path.write_text(text)


def plot_training(record: dict, folder: Path) -> None:
    """The losses of the runs, which lie on each other, and below how far each lies from the first
    run with torch's kernels."""
    losses = {f["losses_of"]: f["losses"] for f in record["figures"] if "losses_of" in f}
    steps = range(1, len(losses["torch"]) + 1)
    figure, axes = plt.subplots(2, 1, figsize=(11, 7.5), sharex=True)
    colors = {"ours": "C0", "torch": "black", "torch_again": "C7", "torch_cudnn": "C2"}
    for name, curve in sorted(losses.items(), reverse=True):  # ours last, on top of the others
        width = 1.6 if name == "ours" else 0.9
        style = {"color": colors.get(name, "C1"), "linewidth": width, "label": CONTENDERS[name]}
        axes[0].plot(steps, curve, **style)
        distances = [x - y for x, y in zip(curve, losses["torch"])]
        axes[1].plot(steps, distances, **style)
    axes[0].set_ylabel("loss, nats per token")
    axes[1].set_ylabel("loss less that of torch, flash; nats per token")
    axes[1].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.margins(x=0.01)
    figure.suptitle(f"Training, {record['device']}, 1B parameters, bf16 products")
    labels = axes[0].get_legend_handles_labels()
    figure.legend(*labels, loc="lower center", ncols=len(losses), frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(folder / "training_cuda.png", dpi=110)
    plt.close(figure)
