"""The check of tokens in benchmarks.generation: our attention passes it, wrong attention does not.

In float32 on a small model, where the tokens must be eager's wherever two logits are not equal.
"""

import pytest

# A machine that only runs the GPU tests need not have it; `make test` always does.
pytest.importorskip("transformers", reason="Transformers is not installed")

from benchmarks import generation

SIZES = ["--layers", "2", "--hidden-size", "512", "--vocab-size", "512", "--longest-prompt", "192"]
SIZES += ["--batch-size", "4", "--requests", "3", "--new-tokens", "24", "--page-size", "16"]
# Where small models choose by a share of the softmax as the large one does.
SIZES += ["--device", "cpu", "--sharpness", "0.8"]


@pytest.fixture(scope="module")
def figures(kernel) -> list:
    runs = [(way, "ours", "float32", None) for way in ("dynamic", "static", "continuous")]
    runs += [("dynamic", "ours", "float32", fault) for fault in generation.FAULTS]
    options = generation.parse_arguments(SIZES)
    return generation.measure(kernel, options, runs, report=lambda figures: None)


def test_our_attention_passes(figures):
    assert generation.failures(figures) == []
    sound = [figure for figure in figures if figure["fault"] is None]
    assert [figure["share_covered"] for figure in sound] == [1.0] * 3
    assert [figure["answers_of_float32"] for figure in sound] == [1.0] * 3


@pytest.mark.parametrize("fault", generation.FAULTS)
def test_wrong_attention_does_not(figures, fault):
    [figure] = [figure for figure in figures if figure["fault"] == fault]
    assert figure["wrong"] > 0


def test_names_what_fails(figures):
    wrong = dict(figures[0], wrong=3)
    unclear = dict(figures[1], share_covered=0.9)
    unnoticed = dict(figures[-1], wrong=0)
    texts = generation.failures([wrong, unclear, unnoticed])
    assert [text.split(": ")[0] for text in texts] == [
        "dynamic, ours, float32",
        "static, ours, float32",
        "dynamic, ours, float32",
    ]
    assert "nothing tells" in texts[-1]
