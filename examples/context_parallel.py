"""Ring attention: sequences too long for one device, cut over several, forward and backward.

Every process holds two chunks of each sequence, one from its front and one from its end, so that
all have the same work under a causal mask (zigzag). Keys and values travel around the ring while
attention runs on those that are there; the partial results are merged by their softmax_lse. Nothing
here computes a gradient: softmax_lse is differentiable, so autograd goes back through the merge,
and a shift of keys and values goes back as a shift of their gradients.

    torchrun --nproc-per-node 2 examples/context_parallel.py

compares ring attention with attention on one device: over NCCL where there is a GPU for each
process, else over gloo on the CPU.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/flash-attn-norm"
# Read when the libraries are imported: this checkout's build, and no network.
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={REPO_ROOT}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402


@dataclass(frozen=True)
class Zigzag:
    """Which rows of packed sequences each process holds.

    A sequence is cut into 2 * world_size chunks, as even as its length allows; process r holds
    chunk r and the r-th from the end, one after the other. Any length goes, 0 too.
    """

    lengths: tuple[int, ...]
    world_size: int

    def halves(self, rank: int) -> list[tuple[int, int]]:
        """Rows of the front and of the end chunk, for each sequence."""
        return [(len(front), len(end)) for front, end in self._chunks(rank)]

    def num_rows(self, rank: int) -> int:
        return sum(front + end for front, end in self.halves(rank))

    def positions(self, rank: int) -> Tensor:
        """The position of each local row in its own sequence: what a rotary embedding takes."""
        return torch.tensor([i for pair in self._chunks(rank) for chunk in pair for i in chunk])

    def rows(self, rank: int) -> Tensor:
        """The index of each local row in the packed tensor of all: ``local = packed[rows]``."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        return torch.tensor(
            [
                start + i
                for start, pair in zip(starts, self._chunks(rank), strict=True)
                for chunk in pair
                for i in chunk
            ],
            dtype=torch.int64,
        )

    def _chunks(self, rank: int) -> list[tuple[range, range]]:
        count = 2 * self.world_size
        return [
            tuple(
                range(length * chunk // count, length * (chunk + 1) // count)
                for chunk in (rank, count - 1 - rank)
            )
            for length in self.lengths
        ]


@dataclass(frozen=True)
class RingStep:
    """Attention of this process's queries to the keys of one process."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    causal: bool


class Ring:
    """The processes of ``group`` in a circle, each with the next one's rank and its own steps.

    Build one for a batch and use it in every layer: it holds the index tensors.

    Args:
        lengths: of the sequences, all of their rows; the same on every process.
        causal: whether a row sees no key behind its own position.
        device: of the tensors to come.
        group: None is the default group.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        causal: bool,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.zigzag = Zigzag(tuple(lengths), self.world_size)
        self.next, self.previous = (
            self._global_rank(self.rank + 1),
            self._global_rank(self.rank - 1),
        )
        # In step s the keys of the process s places before this one are here.
        self.sources = [(self.rank - step) % self.world_size for step in range(self.world_size)]
        self.steps = [self._step(source, causal, device) for source in self.sources]

    def _global_rank(self, rank: int) -> int:
        rank %= self.world_size
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _step(self, source: int, causal: bool, device: torch.device) -> RingStep:
        queries, keys = self.zigzag.halves(self.rank), self.zigzag.halves(source)
        if not causal or source == self.rank:
            # The two chunks stand in order, so a causal mask of the whole is the right one.
            pairs = [(sum(q), sum(k)) for q, k in zip(queries, keys, strict=True)]
        elif source < self.rank:
            # Front keys come before all of these queries; end keys after them, seen by none.
            pairs = [
                pair
                for q, (front, end) in zip(queries, keys, strict=True)
                for pair in ((sum(q), front), (0, end))
            ]
        else:
            # All keys come after the front queries and before the end ones.
            pairs = [
                pair
                for (front, end), k in zip(queries, keys, strict=True)
                for pair in ((front, 0), (end, sum(k)))
            ]
        return RingStep(
            _cumulative([q for q, _ in pairs], device),
            _cumulative([k for _, k in pairs], device),
            causal and source == self.rank,
        )


def ring_attention(
    attention: Callable,
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    s_aux: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """``flash_attn_varlen_func`` over sequences that are cut over the processes of a ring.

    A step's backward pass reads the keys and values that were here in that step, so until it has
    run, a process holds those of all processes. Gradient checkpointing around the layer, which
    repeats the ring, leaves that to one layer at a time.

    Args:
        attention: the package's ``flash_attn_varlen_func``.
        ring: of the batch.
        q: (rows, num_heads_q, head_dim), this process's rows in the order of ``Zigzag``.
        k: (rows, num_heads_kv, head_dim).
        v: (rows, num_heads_kv, head_dim_v).
        s_aux: (num_heads_q,), the attention sink of each head; its gradient is that of the local
            rows, to be summed over the processes like any parameter's.
        options: ``softmax_scale``, ``softcap``, ``deterministic``. Windows, ALiBi and biases
            depend on positions that a part of the keys does not know: not supported.

    Returns:
        out, (rows, num_heads_q, head_dim_v), and softmax_lse, (num_heads_q, rows), as if the
        sequences were whole.
    """
    unknown = options.keys() - {"softmax_scale", "softcap", "deterministic"}
    if unknown:
        raise ValueError(f"ring attention does not take {', '.join(sorted(unknown))}")
    parts = []
    for step, current in enumerate(ring.steps):
        is_last = step + 1 == ring.world_size
        if not is_last:
            shift = Shift(ring, step)
            coming = StartShift.apply(shift, k, v)
        # Meanwhile keys and values travel: they are needed only after this.
        parts.append(
            attention(
                q,
                k,
                v,
                current.cu_seqlens_q,
                current.cu_seqlens_k,
                q.shape[0],
                k.shape[0],
                causal=current.causal,
                return_softmax_lse=True,
                **options,
            )
        )
        if not is_last:
            k, v = FinishShift.apply(shift, *coming)
    return merge(parts, s_aux)


def merge(parts: list[tuple[Tensor, Tensor]], s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention to all keys from that to parts of them, each (out, softmax_lse).

    A part in which a row sees no key has softmax_lse -inf, so its weight is 0. A sink is one more
    part, without a value.
    """
    lses = [softmax_lse for _, softmax_lse in parts]
    if s_aux is not None:
        lses.append(s_aux.float()[:, None].expand_as(lses[0]))
    lse = torch.stack(lses)
    weights = lse.softmax(0).transpose(1, 2).unsqueeze(-1)  # (parts, rows, num_heads_q, 1)
    out = sum(weight * out.float() for weight, (out, _) in zip(weights, parts, strict=False))
    return out.to(parts[0][0].dtype), lse.logsumexp(0)


class Shift:
    """K and V go one place on around the ring; in the backward pass their gradients come back."""

    def __init__(self, ring: Ring, step: int):
        self.ring = ring
        self.here, self.coming = (
            ring.zigzag.num_rows(source) for source in ring.sources[step : step + 2]
        )

    def start(self, tensors: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, ...]:
        """Sends the tensors and gives those that will be received, not filled yet."""
        ring = self.ring
        target, source = (ring.previous, ring.next) if backward else (ring.next, ring.previous)
        rows = self.here if backward else self.coming
        self.sent = [tensor.contiguous() for tensor in tensors]  # kept until they have left
        self.received = tuple(tensor.new_empty(rows, *tensor.shape[1:]) for tensor in tensors)
        operations = [
            dist.P2POp(operation, tensor, peer, ring.group, tag)
            for operation, peer, those in (
                (dist.isend, target, self.sent),
                (dist.irecv, source, self.received),
            )
            for tag, tensor in enumerate(those)
            if tensor.numel() > 0
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []
        return self.received

    def finish(self) -> tuple[Tensor, ...]:
        """On a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        received, self.sent, self.received = self.received, None, None
        return received


# A shift is two functions with attention between them. Autograd takes, of what is ready, the latest
# call first: going back, the attention runs between the two again, while the gradients travel.


class StartShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shift, k, v):
        ctx.shift = shift
        return shift.start((k, v), backward=False)

    @staticmethod
    def backward(ctx, *_order):
        return None, *ctx.shift.finish()


class FinishShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shift, k, v):
        ctx.shift = shift
        shift.finish()
        return k, v

    @staticmethod
    def backward(ctx, dk, dv):
        ctx.shift.start((dk, dv), backward=True)
        # Only the order matters from here to StartShift: the gradients of this process's keys and
        # values, which may have another number of rows, are received meanwhile.
        return None, dk, dv


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _compare(attention: Callable, device: torch.device) -> None:
    """Prints how far ring attention lies from attention on one device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = (4096, 1000, 3)
    ring = Ring(lengths, True, device)
    torch.manual_seed(0)  # the same tensors on every process
    shapes = [(sum(lengths), heads, 64) for heads in (14, 2, 2, 14)]
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    cu_seqlens = _cumulative(lengths, device)
    longest = max(lengths)
    out = attention(*whole, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    expected = [out, *torch.autograd.grad(out, whole, dout)]

    rows = ring.zigzag.rows(ring.rank).to(device)
    local = [tensor[rows].requires_grad_() for tensor in (q, k, v)]
    out, _ = ring_attention(attention, ring, *local)
    actual = [out, *torch.autograd.grad(out, local, dout[rows])]
    for name, ours, reference in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        difference = (ours - reference[rows]).abs().max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        if ring.rank == 0:
            print(f"{name:4} largest difference from one device: {difference.item():.1e}")


def main() -> None:
    from kernels import get_kernel

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    kernel = get_kernel(REPO_ID, revision="v3", trust_remote_code=True)
    _compare(kernel.flash_attn_varlen_func, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
