"""Trains a language model with our attention and norms on one device or several.

    python examples/train_distributed.py                                     one device
    torchrun --nproc-per-node 2 examples/train_distributed.py --sharding fsdp2

ddp: a copy of the model on each device, the batch divided. fsdp2: the weights divided too. tp: the
heads and the hidden units of each layer divided, the batch whole. All of them compute the same
training run, so their losses are those of one device up to rounding. Layers are checkpointed: their
activations are computed again in the backward pass.

Weights are random and the text is Python's own reference (tiny_model.py): nothing is downloaded.
The model is tiny on a CPU; `--model 1b` takes a GPU with 40 GB.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/flash-attn-norm"
# Read when the libraries are imported: this checkout's build, and no network.
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={REPO_ROOT}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from tiny_model import qwen3_config, reference_bytes  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    KernelConfig,
    PreTrainedModel,
    Qwen3Config,
)

ATTENTION = f"{REPO_ID}@v3"
# A revision or a version is mandatory, and so is trust for a publisher outside the Hub's list.
WHICH = {"revision": "v3", "trust_remote_code": True}
SETTLE_STEPS = 5  # allocator and libraries warm up; not counted in tokens per second
LARGEST_NORM = 1.0  # of the gradients of a step; longer ones are scaled down to it

# Qwen3's shape: query heads on fewer key/value heads of 128, RMSNorm on hidden states, q and k.
# 1b: 1.07e9 parameters, of which 67e6 are the embedding; the text has 256 different tokens.
# 1b-wide: 0.99e9 in fewer layers, which takes the host half as long, and no more tokens than these.
MODELS = {
    "tiny": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "1b": {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1b-wide": {
        "vocab_size": 256,
        "hidden_size": 3072,
        "num_hidden_layers": 9,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
# Whose kernels run: both of ours, none of ours (torch's scaled_dot_product_attention, Transformers'
# RMSNorm), or one of ours.
KERNELS = ("ours", "torch", "attention", "norms")
SHARDINGS = ("one", "ddp", "fsdp2", "tp")


@dataclass(frozen=True)
class Training:
    """One training run."""

    model: str = "tiny"
    sharding: str = "one"
    kernels: str = "ours"
    steps: int = 50
    batch_size: int = 2  # of all processes together
    seqlen: int = 128
    learning_rate: float = 3e-4
    is_checkpointed: bool = True
    is_in_bf16: bool = True  # products in bfloat16; weights and sums of gradients stay float32
    is_head_in_float32: bool = False  # logits that autocast does not round


@dataclass(frozen=True)
class Outcome:
    losses: list[float]  # of the whole batch, one per step
    tokens_per_second: float  # of all processes together
    peak_bytes: int  # device memory of this process; 0 on a CPU


def build_model(training: Training, device: torch.device) -> PreTrainedModel:
    """The same random weights in every call on devices of one type, in float32."""
    config: Qwen3Config = qwen3_config(**MODELS[training.model])
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=ATTENTION if training.kernels in ("ours", "attention") else "sdpa",
        ).train()
    if training.kernels in ("ours", "norms"):
        use_our_norms(model, device)
    if training.is_head_in_float32:
        use_float32_head(model, device)
    if training.is_checkpointed:
        model.gradient_checkpointing_enable()
    return model


def use_our_norms(model: PreTrainedModel, device: torch.device) -> None:
    """To be called before the model is sharded: what tensor parallelism adds to a norm's forward
    would be replaced with it."""
    if device.type == "cuda":
        layer = (f"{REPO_ID}:LlamaRMSNorm", WHICH)
        # Without inherit_mapping=False, Transformers would fetch its default kernels as well.
        config = KernelConfig({"RMSNorm": {"cuda": layer}}, inherit_mapping=False)
        model.set_use_kernels(True, config)
        return
    layer = LayerRepository(REPO_ID, layer_name="LlamaRMSNorm", **WHICH)
    with use_kernel_mapping({"RMSNorm": {"cpu": layer}}, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device="cpu")


def use_float32_head(model: PreTrainedModel, device: torch.device) -> None:
    """Logits of a few bits make the loss of a step coarse. Cheap where the vocabulary is small."""
    head = model.lm_head

    def forward(hidden_states: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            return torch.nn.functional.linear(hidden_states.float(), head.weight.float())

    head.forward = forward


def shard_fsdp2(model: PreTrainedModel, training: Training, device: torch.device):
    """Weights and optimizer states are divided; a layer's weights are whole only while it runs."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh}
    if training.is_in_bf16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def shard_heads(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Tensor parallelism: each process has its share of the query and the key/value heads, and of
    the hidden units of the feed-forward layers. Attention and norms see plain local tensors."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan = {
        **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }

    def sum_over_heads(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad, group=mesh.get_group())

    for layer in model.model.layers:
        # The weights are the same everywhere already: each process cuts its part out of its own.
        parallelize_module(layer, mesh, plan, src_data_rank=None)
        # These norms see the local heads only; all other undivided weights see everything.
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.register_post_accumulate_grad_hook(sum_over_heads)
    return model


def shard(model: PreTrainedModel, training: Training, device: torch.device) -> torch.nn.Module:
    if training.sharding == "ddp":
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, devices, gradient_as_bucket_view=True)
    if training.sharding == "fsdp2":
        return shard_fsdp2(model, training, device)
    if training.sharding == "tp":
        return shard_heads(model, device)
    return model


def batches(training: Training) -> Iterator[Tensor]:
    """Random pieces of the text, the same ones on every machine; (batch_size, seqlen) int64."""
    text = reference_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(training.steps):
        starts = torch.randint(
            len(text) - training.seqlen, (training.batch_size,), generator=generator
        )
        yield torch.stack([text[start : start + training.seqlen] for start in starts])


def precision(training: Training, device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast, but for fsdp2, whose policy casts the weights before they are gathered."""
    enabled = training.is_in_bf16 and training.sharding != "fsdp2"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    # One kernel updates all weights of a group: divided and undivided ones each have their own.
    groups: dict[bool, list] = {}
    for parameter in model.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()], lr=learning_rate, fused=True
    )


def clip_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Scales the gradients down to LARGEST_NORM if all of them together are longer. Each group of
    the optimizer has a norm of its own, for divided and undivided weights do not add."""
    norms = []
    for group in optimizer.param_groups:
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in group["params"]])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grads_with_norm_(group["params"], LARGEST_NORM, total)


def train(
    training: Training,
    device: torch.device,
    watch: Callable[[int, torch.nn.Module], None] = lambda step, model: None,
    prepare: Callable[[PreTrainedModel], None] = lambda model: None,
) -> Outcome:
    """Runs it; ``watch(step, model)`` is called between the backward pass and the update,
    ``prepare(model)`` before the model is sharded."""
    divides_batch = training.sharding in ("ddp", "fsdp2")
    count, rank = (dist.get_world_size(), dist.get_rank()) if divides_batch else (1, 0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = build_model(training, device)
    prepare(model)
    model = shard(model, training, device)
    optimizer = make_optimizer(model, training.learning_rate)
    warmup = max(1, training.steps // 5)
    losses = []
    started, settle_steps = 0.0, min(SETTLE_STEPS, training.steps - 1)
    for step, tokens in enumerate(batches(training)):
        if step == settle_steps:
            started = now(device)
        tokens = tokens.chunk(count)[rank].to(device)
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * min(1.0, (step + 1) / warmup)
        with precision(training, device):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        watch(step, model)
        clip_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    seconds = now(device) - started
    losses = torch.stack(losses)
    if count > 1:
        dist.all_reduce(losses)
    tokens = (training.steps - settle_steps) * training.batch_size * training.seqlen
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Outcome((losses / count).tolist(), tokens / seconds, peak_bytes)


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def free_memory() -> None:
    """What a finished run held, graphs and hooks in cycles included."""
    gc.collect()
    torch.cuda.empty_cache()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--sharding", choices=SHARDINGS, default="one")
    parser.add_argument("--kernels", choices=KERNELS, default="ours")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=2, help="of all processes together")
    parser.add_argument("--seqlen", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--output", type=Path, help="JSON file for the losses")
    return parser.parse_args()


def be_quiet() -> None:
    """Only errors: `kernels` lists the layers that it leaves as they are."""
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("kernels").setLevel(logging.ERROR)


def choose_device() -> torch.device:
    """A GPU of its own for each process, or the CPU for all."""
    local_rank, count = (
        int(os.environ.get(name, default))
        for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if torch.cuda.device_count() < count:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def start_processes(device: torch.device) -> None:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
    )


def main() -> None:
    arguments = vars(parse_arguments())
    output = arguments.pop("output")
    be_quiet()
    device = choose_device()
    training = Training(**arguments)
    if device.type == "cpu":
        training = replace(training, is_in_bf16=False)
    is_distributed = "RANK" in os.environ
    if is_distributed:
        start_processes(device)
    elif training.sharding != "one":
        raise SystemExit(f"--sharding {training.sharding} runs in several processes: use torchrun")
    outcome = train(training, device)
    if not is_distributed or dist.get_rank() == 0:
        for step in range(0, training.steps, max(1, training.steps // 10)):
            print(f"step {step + 1:4}  loss {outcome.losses[step]:.4f}")
        memory = f", {outcome.peak_bytes / 1e9:.1f} GB" if device.type == "cuda" else ""
        print(f"{outcome.tokens_per_second:,.0f} tokens/s{memory}")
        if output is not None:
            output.write_text(json.dumps({**vars(training), **vars(outcome)}) + "\n")
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
