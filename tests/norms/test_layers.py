"""The layers in place of models' own norms: every class of Transformers that the Hub's mapping
names, torch.nn's two, and what kernels asks of a layer."""

import ast
from pathlib import Path

import pytest
import torch
import transformers
from errors import assert_same_bits, assert_within, tolerance
from kernels.layer.layer import _validate_layer
from torch import nn

LAYERS = ["RMSNorm", "LlamaRMSNorm", "LigerRMSNorm", "GemmaRMSNorm", "LayerNorm"]
MODELS = Path(transformers.__file__).parent / "models"


def hub_name(decorators) -> str:
    for decorator in decorators:
        if isinstance(decorator, ast.Call) and decorator.func.id == "use_kernel_forward_from_hub":
            return decorator.args[0].value
    return ""


def norm_classes() -> dict:
    """{"model.Class": (name in the mapping, source)}. Read, not imported: importing all these
    models takes longer than all other tests of the norms."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text()
        if "RMSNorm" not in text:
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef):
                continue
            name = hub_name(d for d in node.decorator_list if hasattr(d, "func"))
            if name in ("RMSNorm", "RMSNormZeroCentered"):
                node.decorator_list = []
                found[f"{path.parent.name}.{node.name}"] = (name, ast.unparse(node))
    return found


CLASSES = norm_classes()


def make_class(source: str) -> type:
    namespace = {"torch": torch, "nn": nn, "Tensor": torch.Tensor}
    exec(source, namespace)
    return namespace[ast.parse(source).body[0].name]


def replaced(kernel, module, layer_name):
    """The module with the forward method of one of our layers, as kernelize gives it."""
    layer = getattr(kernel.layers, layer_name)
    _validate_layer(check_cls=type(module), cls=layer, repo=layer_name)
    copy = type(module).__new__(type(module))
    copy.__dict__ = dict(module.__dict__)
    copy.forward = layer.forward.__get__(copy)
    return copy


def run(module, x, dout):
    x = x.detach().clone().requires_grad_()
    out = module(x)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(out, [x, *parameters], dout.to(out.dtype))
    names = ["dx", *(f"d{name}" for name, _ in module.named_parameters())]
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def compare(kernel, module, layer_name, x, same_formula=None):
    """``same_formula``: a module that computes what the layer does, if ``module`` rounds less."""
    dout = torch.randn_like(x)
    ours = run(replaced(kernel, module, layer_name), x, dout)
    theirs = run(same_formula or module, x, dout)
    expected = run(module.double(), x.double(), dout.double())
    module.to(x.dtype)
    for name, reference in expected.items():
        in_torch = theirs[name].to(ours[name].dtype)
        assert_within(name, ours[name], reference, tolerance(reference, in_torch))
    return ours, theirs


def test_there_are_as_many_classes_as_there_were():
    # A reader that finds none would test nothing.
    assert len(CLASSES) > 100
    assert "llama.LlamaRMSNorm" in CLASSES


@pytest.mark.parametrize("name", CLASSES)
def test_class_of_transformers(kernel, bf16_place, name):
    mapped, source = CLASSES[name]
    layer_name = "LlamaRMSNorm" if mapped == "RMSNorm" else "GemmaRMSNorm"
    module = make_class(source)(96).to(**bf16_place)
    with torch.no_grad():
        module.weight.add_(torch.randn_like(module.weight) / 4)
    # Squares that sum up exactly: the order of additions changes no bit.
    x = torch.randint(-16, 17, (2, 5, 96), device=bf16_place["device"]).to(torch.bfloat16) / 8
    same_formula = None
    if mapped == "RMSNorm" and "hidden_states.to(input_dtype)" not in source:
        # Rounds once, unlike the models that the mapping's layer for "RMSNorm" is made for.
        same_formula = make_class(CLASSES["llama.LlamaRMSNorm"][1])(96).to(**bf16_place)
        same_formula.load_state_dict(module.state_dict())
    ours, theirs = compare(kernel, module, layer_name, x, same_formula)
    assert_same_bits("out", ours["out"], theirs["out"].to(ours["out"].dtype))


@pytest.mark.parametrize("layer_name", ["LlamaRMSNorm", "LigerRMSNorm"])
def test_llama(kernel, place, layer_name):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(256, eps=1e-5).to(**place)
    compare(kernel, module, layer_name, torch.randn(3, 7, 256, **place))


def test_gemma(kernel, place):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    module = Gemma3RMSNorm(256).to(**place)
    with torch.no_grad():
        module.weight.normal_()
    compare(kernel, module, "GemmaRMSNorm", torch.randn(3, 7, 256, **place))


@pytest.mark.parametrize("affine", [False, True], ids=["no weight", "weight"])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_torch_rms_norm(kernel, place, affine, eps):
    module = nn.RMSNorm(64, eps=eps, elementwise_affine=affine).to(**place)
    # Rows whose mean square is near the machine epsilon of float32, where the default decides
    compare(kernel, module, "RMSNorm", torch.randn(3, 7, 64, **place) * 2**-10)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("affine", [False, True], ids=["no weight", "weight"])
def test_torch_layer_norm(kernel, place, affine, bias):
    module = nn.LayerNorm(64, elementwise_affine=affine, bias=bias).to(**place)
    compare(kernel, module, "LayerNorm", torch.randn(3, 7, 64, **place))


@pytest.mark.parametrize("layer_name", ["RMSNorm", "LayerNorm"])
def test_more_than_the_last_dimension_is_refused(kernel, layer_name):
    module = getattr(nn, layer_name)((3, 4))
    with pytest.raises(ValueError, match=r"normalized_shape is \(3, 4\); .* must have one entry"):
        replaced(kernel, module, layer_name)(torch.randn(2, 3, 4))


@pytest.mark.parametrize("layer_name", LAYERS)
def test_contract(kernel, layer_name):
    layer = getattr(kernel.layers, layer_name)
    assert issubclass(layer, nn.Module)
    assert layer.__init__ is nn.Module.__init__
    members = set(dir(layer)) - set(dir(nn.Module))
    assert members <= {"can_torch_compile", "has_backward"}
    assert layer.can_torch_compile
    assert layer.has_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_layer(kernel, device, dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = replaced(kernel, LlamaRMSNorm(64).to(device, dtype), "LlamaRMSNorm")
    x = torch.randn(3, 64, device=device, dtype=dtype)
    compiled = torch.compile(module.forward, fullgraph=True, backend="aot_eager")
    assert_same_bits("out", compiled(x), module(x))


def test_float32_weight_under_16_bit_x(kernel, bf16_place):
    # The model's own norm gives float32 here; the layer keeps the dtype of its input.
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(64).to(bf16_place["device"])
    x = torch.randn(3, 64, **bf16_place)
    ours = replaced(kernel, module, "LlamaRMSNorm")(x)
    assert ours.dtype == torch.bfloat16
    assert_within("out", ours, module(x).double(), 2**-8 * 4)
