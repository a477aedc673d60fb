import pytest
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _places(*dtype_names):
    return [
        pytest.param(
            {"device": torch.device(device), "dtype": DTYPES[name]},
            id=f"{device}-{name}",
            marks=[pytest.mark.gpu] if device == "cuda" else [],
        )
        for device in ("cpu", "cuda")
        for name in dtype_names
    ]


@pytest.fixture(params=_places("float32", "bfloat16", "float16"))
def place(request) -> dict:
    """``device`` and ``dtype`` of x: every pair that the norms take."""
    return request.param


@pytest.fixture(params=_places("bfloat16"))
def bf16_place(request) -> dict:
    """``device`` and bfloat16, for tests that need no other dtype."""
    return request.param


@pytest.fixture(params=_places("float32"))
def fp32_place(request) -> dict:
    """``device`` and float32."""
    return request.param
