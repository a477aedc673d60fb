"""Today's API against the record of the newest published version, and the comparison itself."""

import json
import tomllib

import pytest
from releasing import ROOT, api

from tools.api_surface import Surface, compare, merge, surface_of
from tools.build_toml import read_build_toml
from tools.release_collect import api_changes
from tools.release_record import newest_lock, to_toml


@pytest.fixture(scope="module")
def surface(kernel) -> Surface:
    return surface_of(kernel, "cpu")


def test_no_change_without_a_bump(surface):
    """An addition or a change of what is published needs a higher general.version in build.toml.
    Until a version is published, additions are part of it."""
    version = read_build_toml(ROOT).general.version
    _, problems = api_changes(ROOT, version, surface)
    assert problems == []
    newest = newest_lock(ROOT)
    if newest is None:
        assert version == 1
    else:
        assert version >= newest[0]


def test_the_record_would_show_a_change(surface, tmp_path):
    (tmp_path / "releases").mkdir()
    record = tmp_path / "releases" / "v1.toml"
    record.write_text(to_toml({"version": 1, "api": surface}))
    assert api_changes(tmp_path, 1, surface) == ([], [])

    more = {**surface, "all": [*surface["all"], "one_more_func"]}
    changes, problems = api_changes(tmp_path, 1, more)
    assert changes == ["added: one_more_func"]
    assert "raise general.version in build.toml" in problems[0]
    assert api_changes(tmp_path, 2, more) == (changes, [])


def test_what_the_surface_holds(surface, kernel):
    assert surface["all"] == sorted(kernel.__all__)
    assert surface["functions"]["flash_attn_func"].startswith("(q, k, v, dropout_p=0.0, ")
    assert set(surface["ops"]) == {
        *("attention_fwd", "attention_bwd", "attention_kvcache", "attention_kvcache_append"),
        *("norm_fwd", "norm_bwd"),
    }
    assert surface["ops"]["attention_fwd"].startswith("(Tensor q, Tensor k, Tensor v, ")
    assert {"_flash_attn_forward", "_wrapped_flash_attn_backward"} <= set(surface["private"])
    assert surface["layers"]["LlamaRMSNorm"].startswith("forward(self, hidden_states) ")
    assert surface["dtypes"]["attention cpu"] == "bfloat16 float16 float32"
    assert surface["dtypes"]["kvcache cpu"] == "bfloat16 float16 float32"
    assert surface["dtypes"]["cache cpu"] == "bfloat16 float8_e4m3fn"
    assert surface["head-dims"] == {"attention cpu": "1-512"}


def test_it_survives_both_forms(surface):
    assert json.loads(json.dumps(surface)) == surface
    assert tomllib.loads(to_toml(surface)) == surface


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({}, {}, []),
        ({}, {"all": ["name", "b"], "functions": {"b": "()"}}, ["removed: function name"]),
        ({"layers": {"N": "x"}}, {"layers": {"N": "y"}}, ["changed: layer Nx -> y"]),
        ({"private": {"_f": "()"}}, {}, ["removed: private function _f"]),
        (
            {"dtypes": {"attention cpu": "a"}},
            {"dtypes": {"attention cpu": "a b"}},
            ["changed: dtypes of attention cpu: a -> a b"],
        ),
        # The GPU was not looked at this time, the CPU not that time.
        ({"dtypes": {"attention cuda": "a"}}, {"dtypes": {"attention cpu": "a"}}, []),
        (
            {"dtypes": {"attention cpu": "a"}, "head-dims": {"attention cpu": "1-256"}},
            {"dtypes": {"attention cpu": "a"}, "head-dims": {"attention cpu": "1-512"}},
            ["changed: head dims of attention cpu: 1-256 -> 1-512"],
        ),
    ],
)
def test_compare(old, new, told):
    changes = compare(api(**old), api(**new))
    assert [change for change in changes if not change.startswith("added: ")] == told


def test_merge_takes_every_device():
    cpu = api(dtypes={"attention cpu": "float32"})
    cuda = api(dtypes={"attention cuda": "bfloat16"})
    merged = merge([cpu, cuda])
    assert merged["dtypes"] == {"attention cpu": "float32", "attention cuda": "bfloat16"}
    assert compare(merged, cpu) == compare(merged, cuda) == []
