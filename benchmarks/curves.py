"""Compares the losses of training runs. ``losses``: by run, a list with one loss per step."""

import math

WINDOW = 10  # steps to either side


def difference_figure(a: str, b: str, losses: dict) -> dict:
    """How far the losses of two runs lie apart, over the steps; the mean keeps its sign."""
    differences = [x - y for x, y in zip(losses[a], losses[b])]
    squares = [difference**2 for difference in differences]
    return {
        "difference": f"{a} - {b}",
        "largest": round(max(map(abs, differences)), 7),
        "root_mean_square": round(math.sqrt(sum(squares) / len(squares)), 7),
        "mean": round(sum(differences) / len(differences), 7),
        "at_step_1": round(differences[0], 7),
    }


def envelope_figure(name: str, losses: dict) -> dict:
    """Whether a run lies where torch's runs do: at each step, its distance from the closest of them
    beside the largest distance between two of them within a few steps."""
    curves = [curve for key, curve in losses.items() if key.startswith("torch")]
    widths = [max(values) - min(values) for values in zip(*curves)]
    ratios = []
    for step, loss in enumerate(losses[name]):
        allowed = max(widths[max(0, step - WINDOW) : step + WINDOW + 1])
        ratios.append(min(abs(loss - curve[step]) for curve in curves) / max(allowed, 1e-7))
    return {
        "within_torch": name,
        "share_of_steps": round(sum(ratio <= 1 for ratio in ratios) / len(ratios), 4),
        "largest_over_allowed": round(max(ratios), 3),
    }


def curve_figures(losses: dict) -> list:
    return [
        {"losses_of": name, "losses": [round(x, 7) for x in curve]}
        for name, curve in losses.items()
    ]


def compare_curves(losses: dict) -> list:
    """Each run against the first of torch, and ours against all of torch."""
    figures = [
        difference_figure(name, "torch", losses)
        for name in losses
        if name != "torch" and "torch" in losses
    ]
    if sum(name.startswith("torch") for name in losses) > 1:
        mine = [name for name in losses if not name.startswith("torch")]
        figures += [envelope_figure(name, losses) for name in mine]
    return figures
