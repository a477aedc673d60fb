"""Run by torchrun in each process: the gradients of one batch under each sharding, to a file.

    PYTHONPATH=tests:examples torchrun --nproc-per-node 2 distributed_worker.py FOLDER

Rank 0 writes FOLDER/<case>.pt: gradients by parameter name, averaged over the processes.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from integration.models import ATTENTION, make_model, random_tokens
from integration.test_kernel_layers import replace_rms_norm
from kernels import Mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

CASES = (
    "ddp",
    "fsdp2",
    "fsdp2_checkpointed_frozen_norms",
    "tp",  # as examples/train_distributed.py divides it
    "tp_checkpointed",
    "tp_by_transformers_plan",
)
BATCH_SIZE, SEQLEN = 4, 21


def case_model(case: str) -> torch.nn.Module:
    """The case's model with our attention and norms, not yet distributed."""
    model = replace_rms_norm(make_model("qwen3", ATTENTION), "LlamaRMSNorm", Mode.TRAINING).train()
    if case.endswith("frozen_norms"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name)
    if "checkpointed" in case:
        model.gradient_checkpointing_enable()
    return model


def backward(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients as whole tensors; a collective call for sharded parameters."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            gradients[name.removeprefix("module.")] = whole.clone()
    return gradients


def shard(model: torch.nn.Module, case: str, mesh: DeviceMesh) -> torch.nn.Module:
    if case == "ddp":
        return DistributedDataParallel(model)
    if case == "tp_by_transformers_plan":
        return apply_tensor_parallelism(model, mesh, dict(model.tp_plan))
    if case.startswith("tp"):
        # Imported here: the processes have examples/ on their path, the test has not.
        from train_distributed import shard_heads

        return shard_heads(model, torch.device("cpu"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)  # weights exist whole only while the layer runs
    return fully_shard(model, mesh=mesh)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    tokens = random_tokens(BATCH_SIZE, SEQLEN)
    for case in CASES:
        model = shard(case_model(case), case, mesh)
        divides_batch = not case.startswith("tp")
        backward(model, tokens.chunk(world_size)[rank] if divides_batch else tokens)
        gradients = full_gradients(model)
        if rank == 0:
            torch.save(gradients, folder / f"{case}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
