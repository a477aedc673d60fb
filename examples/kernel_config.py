"""Two ways to put our RMSNorm layer into a Transformers model: KernelConfig and kernelize.

KernelConfig is Transformers' own way and takes accelerators only; on a CPU, kernels' kernelize does
the same. Runs a tiny random model with and without the layer and compares the logits.

    python examples/kernel_config.py
"""

import os
import tempfile
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/flash-attn-norm"
# Read when the libraries are imported: this checkout's build, and no network.
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={REPO_ROOT}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from tiny_model import qwen3_config, save_model  # noqa: E402
from transformers import AutoModelForCausalLM, KernelConfig, PreTrainedModel  # noqa: E402

# A revision or a version is mandatory, and so is trust for a publisher outside the Hub's list.
WHICH = {"revision": "v3", "trust_remote_code": True}


def with_kernel_config(folder: str) -> PreTrainedModel:
    """For GPUs: the layer is replaced while the model loads."""
    # inherit_mapping=False: only what is named here, not Transformers' default kernels as well.
    config = KernelConfig(
        {"RMSNorm": {"cuda": (f"{REPO_ID}:LlamaRMSNorm", WHICH)}}, inherit_mapping=False
    )
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map="cuda",
        attn_implementation=f"{REPO_ID}@v3",
        allow_all_kernels=True,
        kernel_config=config,
        use_kernels=True,
    )


def with_kernelize(folder: str) -> PreTrainedModel:
    """For every device that kernels knows, CPUs included: the layer is replaced afterwards."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=f"{REPO_ID}@v3",
        allow_all_kernels=True,
    )
    layer = LayerRepository(REPO_ID, layer_name="LlamaRMSNorm", **WHICH)
    with use_kernel_mapping({"RMSNorm": {"cpu": layer}}, inherit_mapping=False):
        return kernelize(model, mode=Mode.INFERENCE, device="cpu")


def main() -> None:
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), qwen3_config())
        model = (with_kernel_config if on_gpu else with_kernelize)(folder)
        plain = AutoModelForCausalLM.from_pretrained(
            folder, dtype=model.dtype, device_map=model.device, attn_implementation="eager"
        )
    tokens = torch.tensor([list(b"RMSNorm divides by the root mean square.")], device=model.device)
    with torch.no_grad():
        difference = (model(tokens).logits - plain(tokens).logits).abs().max().item()
    route = "KernelConfig" if on_gpu else "kernelize"
    print(f"{route} on {model.device}, {model.dtype}")
    print(f"largest difference of the logits from eager: {difference:.1e}")


if __name__ == "__main__":
    main()
