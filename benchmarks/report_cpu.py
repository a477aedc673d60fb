"""Tables of the records on a CPU: attention, norms, loading."""

from benchmarks.report_models import markdown_table, read_figures

PASSES = ("forward", "backward")
DTYPES = ("float32", "bfloat16")
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm", "add_rms": "add + RMSNorm"}
CACHES = {"cold": "cold: everything is fetched", "warm": "warm"}


def range_text(ratios: list) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def attention_table(figures: list) -> str:
    """Our least time over torch's, the least and the largest of all shapes."""

    def cell(dtype: str, name: str) -> str:
        mine = [f for f in figures if (f["dtype"], f["pass"]) == (dtype, name)]
        return range_text([f["ratio_of_mins"] for f in mine])

    rows = [[dtype, *(cell(dtype, name) for name in PASSES)] for dtype in DTYPES]
    return markdown_table(["dtype", *PASSES], rows)


def norms_table(figures: list) -> str:
    """Our least time over torch's, a row for each shape."""
    cells = {
        (f["rows"], f["hidden_size"], f["norm"], f["dtype"], f["pass"]): f["ratio_of_mins"]
        for f in figures
    }
    columns = [(norm, dtype) for norm in NORMS for dtype in DTYPES]
    rows = []
    for shape in dict.fromkeys(key[:2] for key in cells):
        pairs = [[cells[(*shape, *column, name)] for name in PASSES] for column in columns]
        texts = [" / ".join(f"{ratio:.2f}" for ratio in pair) for pair in pairs]
        rows.append([f"{shape[0]} x {shape[1]}", *texts])
    header = [f"{NORMS[norm]}, {dtype}" for norm, dtype in columns]
    return markdown_table(["rows x hidden size", *header], rows)


def loading_table(figures: list) -> str:
    keys = ("get_kernel s", "get_kernel to first result s", "import torch s", "import kernels s")
    rows = [
        [CACHES[f["cache"]], *(f"{f[key]:.2f}" for key in keys)] for f in figures if "cache" in f
    ]
    header = ["cache", "`get_kernel`", "to the first result", "beside it: `import torch`"]
    return markdown_table([*header, "`import kernels`"], rows)


def tables() -> dict:
    """{document: {mark: table}}"""
    return {
        "cpu_attention.md": {"attention on a CPU": attention_table(read_figures("attention_cpu"))},
        "norms.md": {"norms on a CPU": norms_table(read_figures("norms_cpu"))},
        "performance.md": {"loading": loading_table(read_figures("loading_cpu"))},
    }
