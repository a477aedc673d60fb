"""Times ring attention over the processes of the default group, and what it is made of."""

import time

import torch
import torch.distributed as dist
from context_parallel import Ring, Shift, merge, ring_attention
from torch.profiler import ProfilerActivity, profile

LAUNCHES = 4  # per burst: short enough that the card's power limit does not cut in


def seconds_of(function, device: torch.device, turns: int) -> float:
    """Seconds of one call, the median of bursts that all processes start together, each after a
    rest and a call that is not counted; of the slowest process."""
    bursts = []
    for _ in range(turns):
        time.sleep(0.02)
        function()
        synchronize(device)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            function()
        synchronize(device)
        bursts.append((time.perf_counter() - started) / LAUNCHES)
    slowest = torch.tensor(sorted(bursts)[len(bursts) // 2], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def passes(function, inputs: list, dout: torch.Tensor) -> dict:
    """{pass: a function that runs it}; the backward pass with its forward pass."""

    def forward():
        with torch.no_grad():
            function(*inputs)

    def both():
        torch.autograd.grad(function(*inputs), inputs, dout)

    return {"forward": forward, "forward_and_backward": both}


class Case:
    """One batch: its tensors on this process and the ways to compute it."""

    def __init__(self, kernel, cell: dict, lengths: list, device: torch.device):
        self.attention, self.device, self.lengths = kernel.flash_attn_varlen_func, device, lengths
        self.ring = Ring(lengths, cell["causal"], device)
        self.cell = cell
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.local = self._tensors(self.ring.zigzag.num_rows(self.ring.rank))

    def _tensors(self, rows: int) -> list:
        cell = self.cell
        return [
            torch.randn(rows, cell[heads], cell["head_dim"], dtype=self.dtype, device=self.device)
            for heads in ("num_heads_q", "num_heads_kv", "num_heads_kv", "num_heads_q")
        ]

    def whole_ring(self) -> dict:
        *inputs, dout = self.local
        inputs = [tensor.requires_grad_() for tensor in inputs]
        return passes(lambda *qkv: ring_attention(self.attention, self.ring, *qkv)[0], inputs, dout)

    def attention_alone(self) -> dict:
        """The ring's steps on this process's own keys: no communication."""

        def steps(q, k, v):
            parts = [
                self.attention(
                    q,
                    k,
                    v,
                    step.cu_seqlens_q,
                    step.cu_seqlens_k,
                    q.shape[0],
                    k.shape[0],
                    causal=step.causal,
                    return_softmax_lse=True,
                )
                for step in self.ring.steps
            ]
            return merge(parts, None)[0]

        *inputs, dout = self.local
        return passes(steps, [tensor.requires_grad_() for tensor in inputs], dout)

    def communication_alone(self) -> dict:
        """The shifts of K and V, and the ones of their gradients."""

        def shifts(count: int) -> None:
            for _ in range(count):
                shift = Shift(self.ring, 0)
                shift.start([tensor.detach() for tensor in self.local[1:3]], backward=False)
                shift.finish()

        steps = self.ring.world_size - 1
        return {
            "forward": lambda: shifts(steps),
            "forward_and_backward": lambda: shifts(2 * steps),
        }

    def one_device(self) -> dict:
        *inputs, dout = self._tensors(sum(self.lengths))
        ends = torch.tensor([0, *self.lengths]).cumsum(0).to(self.device, torch.int32)
        longest = max(self.lengths)

        def whole(q, k, v):
            return self.attention(q, k, v, ends, ends, longest, longest, causal=self.cell["causal"])

        return passes(whole, [tensor.requires_grad_() for tensor in inputs], dout)


def peak_gb(function, device: torch.device) -> float:
    """Device memory that a call takes beyond what was allocated before."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return round((torch.cuda.max_memory_allocated(device) - before) / 1e9, 3)


def measure_ring(kernel, cell: dict, lengths: list, device: torch.device, turns: int) -> list:
    """One figure per pass. On one GPU, each process computes the whole batch."""
    case = Case(kernel, cell, lengths, device)
    ways = {
        "ring": case.whole_ring(),
        "attention_alone": case.attention_alone(),
        "communication_alone": case.communication_alone(),
        "one_gpu": case.one_device(),
    }
    figures = []
    for which in ("forward", "forward_and_backward"):
        figure = {"pass": which, "sequences": len(lengths), "tokens": sum(lengths), **cell}
        for name, functions in ways.items():
            figure[f"{name}_ms"] = round(seconds_of(functions[which], device, turns) * 1e3, 4)
        exposed = figure["ring_ms"] - figure["attention_alone_ms"]
        hidden = 1 - exposed / figure["communication_alone_ms"]
        figure["share_of_communication_hidden"] = round(min(1.0, max(0.0, hidden)), 3)
        figure["ring_peak_gb"] = peak_gb(ways["ring"][which], device)
        figure["one_gpu_peak_gb"] = peak_gb(ways["one_gpu"][which], device)
        figure["over_one_gpu"] = round(figure["one_gpu_ms"] / figure["ring_ms"], 3)
        figures.append(figure)
    return figures


def timeline(kernel, cell: dict, lengths: list, device: torch.device) -> list:
    """What ran when on this process's device in one forward and backward pass: one figure per
    stretch of kernels of a kind, in microseconds from the first. Empty on a CPU."""
    both = Case(kernel, cell, lengths, device).whole_ring()["forward_and_backward"]
    for _ in range(3):
        both()
    synchronize(device)
    dist.barrier()
    if device.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        both()
        synchronize(device)
    on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(kind_of(e.name), e.time_range.start, e.time_range.end) for e in on_device]
    return [
        {"timeline_of": "ring, forward and backward", "tokens": sum(lengths), **stretch}
        for stretch in stretches(spans)
    ]


def kind_of(name: str) -> str:
    if "nccl" in name.lower():
        return "communication"
    return "attention" if "flash_attn_norm" in name else "merge"


def stretches(spans: list) -> list:
    """Joins what follows within 20 us on something of its kind; times from the first start.

    ``spans``: (kind, start, end) in microseconds.
    """
    joined: list = []
    latest: dict = {}  # of each kind
    for kind, start, end in sorted(spans, key=lambda span: span[1]):
        if kind in latest and start - latest[kind]["end_us"] < 20:
            latest[kind]["end_us"] = max(latest[kind]["end_us"], end)
        else:
            latest[kind] = {"kind": kind, "start_us": start, "end_us": end}
            joined.append(latest[kind])
    first = joined[0]["start_us"] if joined else 0
    return [
        {**s, "start_us": round(s["start_us"] - first, 1), "end_us": round(s["end_us"] - first, 1)}
        for s in joined
    ]
