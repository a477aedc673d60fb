"""Every refusal's text: it names the argument, its value and what is allowed."""

import re

import pytest
import torch

PLACE = {"dtype": torch.bfloat16}


def x_of(device, *shape):
    return torch.randn(*shape, device=device, **PLACE)


def refuses(message, function, *arguments, **options):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        function(*arguments, **options)


def refuses_directly(message, op, *arguments):
    """Without the package's own call around it: torch 2.15 loses the type, which the text says."""
    expected = f"^(ValueError: )?{re.escape(message)}$"
    with pytest.raises((ValueError, RuntimeError), match=expected):
        op(*arguments)


def test_shapes(kernel, device):
    refuses(
        "x has shape (); expected (..., hidden_size) with hidden_size of at least 1",
        kernel.rms_norm,
        torch.tensor(1.0, device=device),
    )
    refuses(
        "x has shape (3, 0); expected (..., hidden_size) with hidden_size of at least 1",
        kernel.rms_norm,
        x_of(device, 3, 0),
    )
    for name, function in (("weight", kernel.rms_norm), ("bias", kernel.layer_norm)):
        for shape, text in (((5,), "(5,)"), ((1, 4), "(1, 4)"), ((), "()")):
            refuses(
                f"{name} has shape {text}; expected (hidden_size,) = (4,), the last dimension of "
                "x, which has shape (2, 3, 4)",
                function,
                x_of(device, 2, 3, 4),
                **{name: torch.zeros(shape, device=device)},
            )
    refuses(
        "residual has shape (2, 4) but x has shape (3, 4); both must be the same",
        kernel.rms_norm,
        x_of(device, 3, 4),
        residual=x_of(device, 2, 4),
    )


def test_dtypes(kernel, device):
    allowed = "allowed are torch.float32, torch.float16 and torch.bfloat16"
    for dtype in (torch.float64, torch.int32):
        wrong = torch.ones(4, device=device, dtype=dtype)
        refuses(f"x has dtype {dtype}; {allowed}", kernel.rms_norm, wrong)
        x = x_of(device, 3, 4)
        refuses(f"weight has dtype {dtype}; {allowed}", kernel.rms_norm, x, wrong)
        refuses(f"bias has dtype {dtype}; {allowed}", kernel.layer_norm, x, bias=wrong)
        residual = torch.ones(3, 4, device=device, dtype=dtype)
        refuses(f"residual has dtype {dtype}; {allowed}", kernel.rms_norm, x, residual=residual)
    refuses(
        "residual has dtype torch.float16 but x has dtype torch.bfloat16; allowed are the dtype of "
        "x and torch.float32",
        kernel.rms_norm,
        x_of(device, 3, 4),
        residual=x_of(device, 3, 4).half(),
    )


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1e-6])
def test_eps(kernel, device, eps):
    text = {"nan": "nan", "inf": "inf"}.get(str(eps), "-1e-06")
    message = f"eps is {text}; it must be finite and not negative"
    refuses(message, kernel.rms_norm, x_of(device, 3, 4), eps=eps)
    refuses(message, kernel.layer_norm, x_of(device, 3, 4), eps=eps)


def test_weight_offset(kernel, device):
    x, weight = x_of(device, 3, 4), x_of(device, 4)
    refuses(
        "weight_offset is nan; it must be finite",
        kernel.rms_norm,
        x,
        weight,
        weight_offset=float("nan"),
    )
    refuses(
        "weight_offset is 1 but weight is None; an offset needs a weight to be added to",
        kernel.rms_norm,
        x,
        weight_offset=1.0,
    )


def test_casting_mode(kernel, device):
    refuses(
        "casting_mode is 'Llama'; allowed are 'llama', 'gemma' and 'none'",
        kernel.rms_norm,
        x_of(device, 3, 4),
        casting_mode="Llama",
    )


@pytest.mark.parametrize("name", ["weight", "residual"])
def test_devices(kernel, name):
    # "meta" is the second device that every machine has
    shape = (4,) if name == "weight" else (3, 4)
    refuses(
        f"{name} is on meta but x is on cpu; all tensors of a call must be on one device",
        kernel.rms_norm,
        x_of("cpu", 3, 4),
        **{name: torch.zeros(shape, device="meta", **PLACE)},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", "residual"])
def test_cpu_tensor_beside_a_gpu_tensor(kernel, name):
    shape = (4,) if name == "weight" else (3, 4)
    refuses(
        f"{name} is on cpu but x is on cuda:0; all tensors of a call must be on one device",
        kernel.rms_norm,
        x_of("cuda", 3, 4),
        **{name: torch.zeros(shape, **PLACE)},
    )


def test_backward_op(kernel, device):
    norm_bwd = kernel._ops.ops.norm_bwd
    sums, dout = x_of(device, 3, 4), x_of(device, 3, 4)
    stats = torch.ones(3, device=device)
    flags = (0.0, 0, False, False, False, False)
    refuses_directly(
        "dout has shape (2, 4) but sum has shape (3, 4); both must be the same",
        norm_bwd,
        x_of(device, 2, 4),
        None,
        sums,
        None,
        None,
        stats,
        *flags,
    )
    refuses_directly(
        "dout has dtype torch.float32; expected torch.bfloat16, the dtype of sum",
        norm_bwd,
        dout.float(),
        None,
        sums,
        None,
        None,
        stats,
        *flags,
    )
    refuses_directly(
        "stats has shape (4,), which does not fit sum with (3, 4)",
        norm_bwd,
        dout,
        None,
        sums,
        None,
        None,
        torch.ones(4, device=device),
        *flags,
    )
    refuses_directly(
        "casting_mode is 3; allowed are 0 (llama), 1 (gemma) and 2 (none)",
        norm_bwd,
        dout,
        None,
        sums,
        None,
        None,
        stats,
        0.0,
        3,
        *flags[2:],
    )


def test_dtensor(kernel):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(3, 4), mesh, [Replicate()])
        refuses(
            "x is a DTensor; the norms take plain tensors: x.to_local() where the last dimension "
            "is not sharded, x.full_tensor() otherwise",
            kernel.rms_norm,
            x,
        )
    finally:
        destroy_process_group()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "part"),
    [
        ("weight", (9,), torch.float32, "weight has shape (9,); expected (hidden_size,) = (8,)"),
        ("weight", (1, 8), torch.float32, "weight has shape (1, 8)"),
        ("weight", (8,), torch.float64, "weight has dtype torch.float64"),
        ("residual", (4, 8), torch.float32, "residual has shape (4, 8) but x has shape (3, 8)"),
        ("residual", (8,), torch.float32, "residual has shape (8,)"),
        ("residual", (3, 8), torch.float16, "residual has dtype torch.float16 but x has"),
    ],
)
def test_meta_tensors_are_refused_as_others(kernel, name, shape, dtype, part):
    for device in ("cpu", "meta"):
        x = torch.zeros(3, 8, device=device)
        with pytest.raises(ValueError, match=re.escape(part)):
            kernel.rms_norm(x, **{name: torch.zeros(shape, dtype=dtype, device=device)})


@pytest.mark.parametrize(
    "option",
    [
        {"eps": -1},
        {"eps": float("nan")},
        {"eps": 1e300},
        {"weight_offset": float("inf")},
        {"weight_offset": 1.0, "weight": None},
    ],
    ids=str,
)
def test_numbers_on_meta(kernel, option):
    """The same text as with values."""
    texts = []
    for device in ("cpu", "meta"):
        x, weight = x_of(device, 3, 4), x_of(device, 4)
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
            kernel.rms_norm(x, **{"weight": weight, **option})
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"{next(iter(option))} is ")
    with pytest.raises(ValueError, match="hidden_size of at least 1"):
        kernel.rms_norm(x_of("meta", 3, 0))


def test_flags_by_position(kernel, device):
    x = x_of(device, 3, 4)
    said = "write flags by name"
    refuses(
        f"eps is True (bool); it must be a number; {said}, as in causal=True",
        kernel.rms_norm,
        x,
        None,
        True,
    )
