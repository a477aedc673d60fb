"""Our layers in place of a model's own: KernelConfig, and kernels' kernelize."""

import logging

import pytest
import torch
from integration.models import (
    ATTENTION,
    Outcome,
    assert_no_worse,
    make_model,
    random_tokens,
    run,
)
from kernels import (
    LayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import nn
from transformers import AutoModelForCausalLM, KernelConfig
from transformers.utils import kernel_config

REPO_ID = "org/flash-attn-norm"
TRUSTED = {"revision": "v1", "trust_remote_code": True}
TOKENS = random_tokens(2, 21)


@pytest.fixture
def calls(kernel, monkeypatch) -> list:
    """The names of our layers' functions, one entry for each call that reaches the kernel."""
    calls = []
    rms_norm = kernel.layers.rms_norm

    def counted(*args, **kwargs):
        calls.append("rms_norm")
        return rms_norm(*args, **kwargs)

    monkeypatch.setattr(kernel.layers, "rms_norm", counted)
    return calls


@pytest.fixture
def cpu_in_kernel_config(monkeypatch):
    """KernelConfig knows accelerators only; everything behind that check works on a CPU."""
    devices = [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", devices)


@pytest.fixture
def saved_model(tmp_path) -> str:
    make_model("qwen3", "eager").save_pretrained(tmp_path)
    return str(tmp_path)


def replace(model: nn.Module, replaced: str, layer_name: str, mode: Mode) -> nn.Module:
    layer = LayerRepository(REPO_ID, layer_name=layer_name, **TRUSTED)
    with use_kernel_mapping({replaced: {"cpu": layer}}, inherit_mapping=False):
        return kernelize(model, mode=mode, device="cpu")


def replace_rms_norm(model: nn.Module, layer_name: str, mode: Mode) -> nn.Module:
    return replace(model, "RMSNorm", layer_name, mode)


def references(family: str, dtype: torch.dtype) -> tuple[Outcome, Outcome]:
    plain = run(make_model(family, "eager", dtype), input_ids=TOKENS)
    exact = make_model(family, "eager", torch.float64, weights_dtype=dtype)
    return plain, run(exact, input_ids=TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer_name", ["LlamaRMSNorm", "LigerRMSNorm"])
def test_kernelize(layer_name, dtype, calls):
    model = replace_rms_norm(make_model("qwen3", "eager", dtype), layer_name, Mode.TRAINING)
    ours = run(model.train(), input_ids=TOKENS)
    assert len(calls) == 2 * 4 + 1  # four norms in each layer and the last one
    assert_no_worse(ours, *references("qwen3", dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernelize_weights_around_zero(dtype, calls):
    model = make_model("qwen3_5", "eager", dtype)
    model = replace(model, "RMSNormZeroCentered", "GemmaRMSNorm", Mode.TRAINING)
    ours = run(model.train(), input_ids=TOKENS)
    assert len(calls) == 2 * 4 + 1
    assert_no_worse(ours, *references("qwen3_5", dtype))


class NormedByTorch(nn.Module):
    """torch.nn's norms, opened for kernels by name as a library would do it."""

    def __init__(self):
        super().__init__()
        layer_norm = use_kernel_forward_from_hub("LayerNorm")(type("L", (nn.LayerNorm,), {}))
        rms_norm = use_kernel_forward_from_hub("TorchRMSNorm")(type("R", (nn.RMSNorm,), {}))
        self.layers = nn.Sequential(
            layer_norm(48),
            layer_norm(48, elementwise_affine=False),
            layer_norm(48, bias=False),
            rms_norm(48),
            rms_norm(48, elementwise_affine=False, eps=1e-3),
        )

    def forward(self, x):
        return self.layers(x)


def test_torch_norms(kernel):
    model = NormedByTorch()
    x = torch.randn(3, 5, 48, requires_grad=True)
    expected, probe = model(x), torch.randn(3, 5, 48)
    inputs = (x, *model.parameters())
    expected_gradients = torch.autograd.grad(expected, inputs, probe)
    model = replace(model, "LayerNorm", "LayerNorm", Mode.TRAINING)
    actual = replace(model, "TorchRMSNorm", "RMSNorm", Mode.TRAINING)(x)
    assert type(actual.grad_fn) is not type(expected.grad_fn)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs, probe), expected_gradients)


def test_kernelize_together_with_attention(calls):
    model = replace_rms_norm(make_model("llama", ATTENTION), "LlamaRMSNorm", Mode.TRAINING)
    ours = run(model.train(), input_ids=TOKENS)
    assert len(calls) == 2 * 2 + 1
    assert_no_worse(ours, *references("llama", torch.float32))


@pytest.mark.parametrize(
    "mapping",
    [
        {"RMSNorm": (f"{REPO_ID}:LlamaRMSNorm", TRUSTED)},
        {"RMSNorm": {"cpu": (f"{REPO_ID}:LigerRMSNorm", TRUSTED)}},
    ],
)
def test_kernel_config(mapping, calls, cpu_in_kernel_config, saved_model):
    model = AutoModelForCausalLM.from_pretrained(
        saved_model,
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        allow_all_kernels=True,
        kernel_config=KernelConfig(mapping, inherit_mapping=False),
        use_kernels=True,
    )
    ours = run(model, input_ids=TOKENS)
    assert len(calls) == 9
    assert_no_worse(ours, *references("qwen3", torch.float32))


def test_kernel_config_from_a_local_folder(calls, cpu_in_kernel_config, saved_model, kernel_folder):
    """On a model that exists: from_pretrained(kernel_config=...) mishandles the local form."""
    config = KernelConfig({"RMSNorm": f"{kernel_folder}:LlamaRMSNorm"}, use_local_kernel=True)
    model = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float32)
    model.set_use_kernels(True, config)
    run(model, input_ids=TOKENS)
    assert len(calls) == 9


def test_kernel_config_refuses_the_cpu_by_name(kernel, saved_model):
    """Why the other route exists. When this fails, Transformers has learned it: simplify docs."""
    config = KernelConfig({"RMSNorm": (f"{REPO_ID}:LlamaRMSNorm", TRUSTED)})
    with pytest.raises(ValueError, match=r"Only devices in .* are supported, got: cpu"):
        AutoModelForCausalLM.from_pretrained(saved_model, kernel_config=config, use_kernels=True)


def test_unknown_layer_is_refused(kernel):
    with pytest.raises(Exception, match="NoSuchNorm"):
        replace_rms_norm(make_model("qwen3", "eager"), "NoSuchNorm", Mode.TRAINING)


@pytest.mark.parametrize(
    "mode", [Mode.INFERENCE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE]
)
def test_every_mode_takes_the_layer(mode, calls, caplog):
    """Layers with a backward that compile serve every mode, without a fallback or a warning."""
    with caplog.at_level(logging.WARNING, logger="kernels"):
        model = replace_rms_norm(make_model("llama", "eager"), "LlamaRMSNorm", mode)
    model(TOKENS)
    assert len(calls) == 5
    assert not [record for record in caplog.records if "RMSNorm" in record.message]
