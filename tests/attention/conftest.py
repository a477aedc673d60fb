import pytest
import torch

_CASES = [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cpu", torch.float16)]
_CASES += [("cuda", torch.bfloat16), ("cuda", torch.float16)]  # a GPU takes no float32


def _name(case):
    return f"{case[0]}-{str(case[1]).split('.')[-1]}"


@pytest.fixture(
    params=[
        pytest.param(case, id=_name(case), marks=[pytest.mark.gpu] if case[0] == "cuda" else [])
        for case in _CASES
    ]
)
def place(request) -> dict:
    """``device`` and ``dtype`` of the inputs: every pair that attention takes."""
    return {"device": torch.device(request.param[0]), "dtype": request.param[1]}


@pytest.fixture(
    params=[
        pytest.param({"device": torch.device("cpu"), "dtype": torch.bfloat16}, id="cpu"),
        pytest.param(
            {"device": torch.device("cuda"), "dtype": torch.bfloat16},
            id="cuda",
            marks=pytest.mark.gpu,
        ),
    ]
)
def bf16_place(request) -> dict:
    """``device`` and bfloat16, for tests that need no other dtype."""
    return request.param
