"""The norms against their peers, forward and backward, in the same run.

    python -m benchmarks.norms --device cuda     on a GPU: every shape, every peer that is installed
    python -m benchmarks.norms --device cpu      against torch's own, on the same threads

On a GPU a figure is the median time of CUDA graph replays in which one pass runs over several sets
of random inputs, more than the L2 holds; GB/s count the fewest bytes the pass must move, and
`of_roof` is their share of what torch.add(x, y, out=z) over several GB moves in the same run.
`elementwise_us` is what torch's elementwise kernel takes that reads and writes as many tensors of
this shape: what a kernel without any sums reaches at this size. The peers are torch's functions,
the same formula under torch.compile, and Liger's kernels (LinkedIn's, from the liger-kernel
package); what torch.compile needs is compiled before, several shapes at a time. On the CPU the
candidates take turns.

Writes benchmarks/results/norms_<device>.json, on a GPU after each shape.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from kernels import get_local_kernel
from torch.nn import functional

from benchmarks.record import write_record

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = [(65536, 128), (16384, 1024), (16384, 4096), (16384, 8192), (4096, 16384), (8192, 65536)]
FEW_ROWS = [(1, 4096), (16, 4096), (128, 4096), (128, 128), (128, 8192)]
CPU_SHAPES = [(16384, 128), (2048, 1024), (2048, 4096), (512, 8192)]
NORMS = ["rms", "layer", "add_rms"]
EPS = 1e-6
# Which of (x, residual, weight, bias) a norm has gradients of.
WITH_GRADIENT = {"rms": (0, 2), "layer": (0, 2, 3), "add_rms": (0, 1, 2)}
# Tensors of the rows' size that a pass reads and writes at least.
TENSORS = {
    ("rms", "forward"): 2,
    ("rms", "backward"): 3,
    ("layer", "forward"): 2,
    ("layer", "backward"): 3,
    ("add_rms", "forward"): 4,
    ("add_rms", "backward"): 4,
}


def median(values: list) -> float:
    return sorted(values)[len(values) // 2]


# ---- candidates: f(x, residual, weight, bias) -> the outputs that have a gradient ----


def ours(kernel) -> dict:
    return {
        "rms": lambda x, r, w, b: (kernel.rms_norm(x, w, EPS),),
        "layer": lambda x, r, w, b: (kernel.layer_norm(x, w, b, EPS),),
        "add_rms": lambda x, r, w, b: kernel.rms_norm(x, w, EPS, residual=r, prenorm=True),
    }


def torch_add_rms(x, r, w, b):
    total = x + r
    return functional.rms_norm(total, total.shape[-1:], w, EPS), total


TORCH = {
    "rms": lambda x, r, w, b: (functional.rms_norm(x, x.shape[-1:], w, EPS),),
    "layer": lambda x, r, w, b: (functional.layer_norm(x, x.shape[-1:], w, b, EPS),),
    "add_rms": torch_add_rms,
}


def compiled() -> dict:
    return {name: torch.compile(function, dynamic=False) for name, function in TORCH.items()}


def liger() -> dict:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return {
        # Without its in-place backward, which overwrites dout: every set is used many times.
        "rms": lambda x, r, w, b: (LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),),
        "layer": lambda x, r, w, b: (LigerLayerNormFunction.apply(x, w, b, EPS),),
        "add_rms": lambda x, r, w, b: LigerFusedAddRMSNormFunction.apply(
            x, r, w, EPS, 0.0, "llama", False
        ),
    }


def find_peers(names: list) -> dict:
    peers = {}
    for name in names:
        if name == "liger":
            try:
                peers["liger"] = liger()
            except ImportError as error:
                print(f"without liger: {error}", flush=True)
        else:
            peers[name] = TORCH if name == "torch" else compiled()
    return peers


# ---- on a GPU ----


def make_sets(rows, hidden_size, dtype, device, num_sets) -> list:
    """[(inputs, douts)]: inputs for a candidate, gradients for its outputs."""
    sets = []
    weight, bias = torch.randn(2, hidden_size, dtype=dtype, device=device)
    for _ in range(num_sets):
        x, residual, dout, dresidual = torch.randn(4, rows, hidden_size, dtype=dtype, device=device)
        inputs = [t.detach().requires_grad_() for t in (x, residual, weight, bias)]
        sets.append((inputs, (dout, dresidual)))
    return sets


def graph_times(run, repeats: int, stream=None) -> list:
    """Seconds of each replay of what run() launches, captured on ``stream``."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = run()
    start = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    end = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for _ in range(3):
        graph.replay()
    for before, after in zip(start, end, strict=True):
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    del kept
    return [before.elapsed_time(after) / 1e3 for before, after in zip(start, end, strict=True)]


def time_pass(function, sets, name, which, repeats) -> float:
    """Median seconds of one pass over one set. Both passes keep what gradients need."""
    used = slice(0, 2 if name == "add_rms" else 1)
    stream = torch.cuda.Stream()
    if which == "forward":

        def run():
            return [function(*inputs) for inputs, _ in sets]

    else:
        # On the stream of the capture: a backward pass runs where its forward pass ran.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = [function(*inputs)[used] for inputs, _ in sets]

        def run():
            return [
                gradients(outs, inputs, douts[used], name)
                for outs, (inputs, douts) in zip(outputs, sets, strict=True)
            ]

    return median(graph_times(run, repeats, stream)) / len(sets)


def gradients(outputs, inputs, douts, name) -> tuple:
    wanted = [inputs[i] for i in WITH_GRADIENT[name]]
    return torch.autograd.grad(outputs, wanted, douts, retain_graph=True)


def time_elementwise(sets, name, which, repeats) -> float:
    """Median seconds in which torch's elementwise kernel reads and writes as many tensors."""
    outs = [torch.empty_like(douts[0]) for _, douts in sets]

    def run():
        for (inputs, douts), out in zip(sets, outs, strict=True):
            x, residual = (t.detach() for t in inputs[:2])
            if which == "backward" and name == "add_rms":
                torch.addcmul(x, residual, douts[0], out=out)
            elif which == "backward":
                torch.add(x, douts[0], out=out)
            else:
                torch.neg(x, out=out)

    # The forward pass with a residual moves twice what the one without does.
    factor = 2 if which == "forward" and name == "add_rms" else 1
    return factor * median(graph_times(run, repeats)) / len(sets)


def roof_gb_per_s(device) -> float:
    """What a kernel can read and write together: torch.add over 6 GB."""
    x, y = torch.randn(2, 1 << 30, dtype=torch.bfloat16, device=device)
    z = torch.empty_like(x)
    seconds = median(graph_times(lambda: torch.add(x, y, out=z), 20))
    return 3 * x.nbytes / seconds / 1e9


def compile_ahead(args) -> None:
    """Fills torch.compile's cache, each shape in a process of its own: one takes some seconds.
    What is not there after a minute is compiled when it is measured."""
    command = [sys.executable, "-m", "benchmarks.norms", "--device", "cuda", "--only-compile"]
    command += ["--build", str(args.build), "--norms", *args.norms, "--dtypes", *args.dtypes]
    processes = [
        subprocess.Popen(
            [*command, "--shapes", f"{rows}x{hidden_size}"],
            cwd=ROOT,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        for rows, hidden_size in args.shapes
    ]
    deadline = time.monotonic() + 60
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def only_compile(args) -> None:
    functions = compiled()
    for dtype in args.dtypes:
        for rows, hidden_size in args.shapes:
            ((inputs, douts),) = make_sets(rows, hidden_size, DTYPES[dtype], "cuda", 1)
            for name in args.norms:
                outputs = functions[name](*inputs)
                gradients(outputs, inputs, douts[: len(outputs)], name)
    torch.cuda.synchronize()


def measure_cuda(kernel, args, save) -> list:
    """Calls save(figures so far) after each shape, so that a run cut short leaves its record."""
    device = torch.device("cuda")
    candidates = {"flash_attn_norm": ours(kernel), **find_peers(args.peers)}
    if "torch_compile" in candidates:
        compile_ahead(args)
    roof = roof_gb_per_s(device)
    print(f"roof: torch.add at {roof:.0f} GB/s", flush=True)
    figures = [{"pass": "roof", "gb_per_s": round(roof, 1)}]
    for dtype in args.dtypes:
        for rows, hidden_size in [tuple(shape) for shape in args.shapes]:
            figures += measure_shape(candidates, rows, hidden_size, dtype, roof, args)
            save(figures)
    return figures


def measure_shape(candidates, rows, hidden_size, dtype, roof, args) -> list:
    figures = []
    tensor_bytes = rows * hidden_size * DTYPES[dtype].itemsize
    # Several times the L2's 50 to 60 MB, and no more than 30 calls in a graph.
    num_sets = max(3, min(30, int(600e6 / tensor_bytes)))
    sets = make_sets(rows, hidden_size, DTYPES[dtype], torch.device("cuda"), num_sets)
    if "torch_compile" in candidates:
        torch._dynamo.reset()  # after a few shapes it would leave a function uncompiled
    # The first graph of a process that allocates what it writes took 8% longer in each replay than
    # the same graph captured again: that one is thrown away.
    time_pass(candidates["flash_attn_norm"][args.norms[0]], sets, args.norms[0], "forward", 1)
    for name in args.norms:
        for which in ("forward", "backward"):
            figure = {
                "norm": name,
                "pass": which,
                "dtype": dtype,
                "rows": rows,
                "hidden_size": hidden_size,
            }
            moved = TENSORS[name, which] * tensor_bytes
            for candidate, functions in candidates.items():
                seconds = time_pass(functions[name], sets, name, which, args.repeats)
                figure[f"{candidate}_us"] = round(seconds * 1e6, 2)
                if candidate == "flash_attn_norm":
                    figure["gb_per_s"] = round(moved / seconds / 1e9, 1)
                    figure["of_roof"] = round(moved / seconds / 1e9 / roof, 3)
            seconds = time_elementwise(sets, name, which, args.repeats)
            figure["elementwise_us"] = round(seconds * 1e6, 2)
            figures.append(figure)
            print_figure(figure)
    return figures


def print_figure(figure: dict) -> None:
    own = figure["flash_attn_norm_us"]
    peers = "  ".join(
        f"{name[:-3]} x{value / own:.2f}"
        for name, value in figure.items()
        if name.endswith("_us") and name != "flash_attn_norm_us"
    )
    print(
        f"{figure['norm']:8}{figure['pass']:9}{figure['dtype']:9}"
        f"{figure['rows']:>6} x {figure['hidden_size']:<6}{own:9.2f} us "
        f"{figure['gb_per_s']:7.0f} GB/s  {figure['of_roof']:.3f} of roof  {peers}",
        flush=True,
    )


# ---- on the CPU ----


def cpu_times(function, inputs, douts, used, wanted) -> list:
    """[forward seconds, backward seconds]."""
    started = time.perf_counter()
    outputs = function(*inputs)[used]
    between = time.perf_counter()
    torch.autograd.grad(outputs, [inputs[i] for i in wanted], douts[used])
    return [between - started, time.perf_counter() - between]


def measure_cpu(kernel, args, save) -> list:
    figures = []
    device = torch.device("cpu")
    candidates = {"flash_attn_norm": ours(kernel), "torch": TORCH}
    for dtype in args.dtypes:
        for rows, hidden_size in [tuple(shape) for shape in args.shapes]:
            ((inputs, douts),) = make_sets(rows, hidden_size, DTYPES[dtype], device, 1)
            for name in args.norms:
                used = slice(0, 2 if name == "add_rms" else 1)
                wanted = WITH_GRADIENT[name]
                times = {candidate: [] for candidate in candidates}
                for _ in range(args.repeats):
                    for candidate, functions in candidates.items():
                        times[candidate].append(
                            cpu_times(functions[name], inputs, douts, used, wanted)
                        )
                for index, which in enumerate(("forward", "backward")):
                    mine = [turn[index] for turn in times["flash_attn_norm"]]
                    peer = [turn[index] for turn in times["torch"]]
                    figure = {
                        "norm": name,
                        "pass": which,
                        "dtype": dtype,
                        "rows": rows,
                        "hidden_size": hidden_size,
                        "min_ms": round(min(mine) * 1e3, 3),
                        "torch_min_ms": round(min(peer) * 1e3, 3),
                        "ratio_of_mins": round(min(mine) / min(peer), 3),
                        "ratio_of_medians": round(median(mine) / median(peer), 3),
                    }
                    figures.append(figure)
                    print("  ".join(f"{key} {value}" for key, value in figure.items()), flush=True)
    return figures


def shape(text: str) -> list:
    return [int(size) for size in text.split("x")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of variants")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--norms", nargs="+", default=NORMS, choices=NORMS)
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="ROWSxHIDDEN")
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["torch", "torch_compile", "liger"],
        choices=["torch", "torch_compile", "liger"],
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--only-compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    is_cpu = args.device == "cpu"
    args.dtypes = args.dtypes or (["float32", "bfloat16"] if is_cpu else ["bfloat16"])
    args.shapes = args.shapes or (CPU_SHAPES if is_cpu else SHAPES + FEW_ROWS)

    torch.manual_seed(0)
    if args.only_compile:
        return only_compile(args)
    kernel = get_local_kernel(args.build)

    def save(figures: list) -> Path:
        return write_record(f"norms_{args.device}", kernel, torch.device(args.device), figures)

    keep = (lambda figures: None) if args.no_record else save
    figures = (measure_cpu if is_cpu else measure_cuda)(kernel, args, keep)
    if not args.no_record:
        print(save(figures))


if __name__ == "__main__":
    main()
