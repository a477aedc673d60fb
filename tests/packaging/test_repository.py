"""What the repository must hold, and must not, for kernel-builder, the Hub and our own rules."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT
from tools.build_toml import read_build_toml
from tools.card import render_card

PACKAGE = ROOT / "torch-ext" / "flash_attn_norm"
CONFIG = read_build_toml(ROOT)

# Names that kernel-builder writes itself.
GENERATED = [
    r"CMakeLists\.txt",
    r"cmake/.*",
    r"setup\.py",
    r"pyproject\.toml",
    r"metadata-(cpu|cuda)\.json",
    r"torch-ext/registration\.h",
    r"torch-ext/flash_attn_norm/_ops\.py",
    r"build/.*",
]


def committed_files() -> list[str]:
    result = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    )
    return [name for name in result.stdout.splitlines() if (ROOT / name).is_file()]


def literal_all(path: Path) -> list[str]:
    """`__all__` as kernel-builder reads it: a literal list."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "__all__":
            return ast.literal_eval(statement.value)
    raise AssertionError(f"{path} has no literal __all__")


def test_generated_names_are_not_committed():
    taken = [
        name
        for name in committed_files()
        if any(re.fullmatch(pattern, name) for pattern in GENERATED)
    ]
    assert taken == []


def test_no_file_names_a_registry_host():
    hosts = re.compile(
        "|".join(
            [
                r"pypi\." + "org",
                r"pythonhosted\." + "org",
                r"deb\." + "debian",
                r"download\." + "pytorch",
            ]
        )
    )
    naming = [
        name
        for name in committed_files()
        if hosts.search((ROOT / name).read_bytes().decode(errors="ignore"))
    ]
    assert naming == []


def test_build_toml_lists_every_header_that_a_source_includes():
    """kernel-builder copies only the files that build.toml lists."""
    sections = [CONFIG.torch, *CONFIG.kernel.values()]
    listed = {source for section in sections for source in section.src}
    folders = ["torch-ext", "csrc"]
    missing = set()
    for source in listed:
        for include in re.findall(r'^\s*#include "(.+?)"', (ROOT / source).read_text(), re.M):
            names = {f"{folder}/{include}" for folder in [Path(source).parent, *folders]}
            if include != "registration.h" and not names & listed:
                missing.add(f"{source} includes {include}")
    assert sorted(missing) == []


def test_both_backends_have_the_same_cpu_sources():
    """A CUDA variant serves CPU tensors as well."""

    def cpu_sources(backend: str) -> set[str]:
        kernels = CONFIG.kernels_for(backend).values()
        return {source for kernel in kernels for source in kernel.src if "/cpu/" in source}

    assert cpu_sources("cpu")
    assert cpu_sources("cpu") == cpu_sources("cuda")


def test_kernels_do_not_include_torch():
    """It is torch-ext/ that knows torch: a .cu file with torch's headers takes a minute."""
    pattern = re.compile(r"#include\s*[<\"](torch|ATen|c10)/")
    sources = [name for name in committed_files() if name.startswith("csrc/")]
    assert [name for name in sources if pattern.search((ROOT / name).read_text())] == []


def test_torch_ext_includes_stable_headers_only():
    allowed = re.compile(r"torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/")
    sources = [name for name in committed_files() if re.match(r"torch-ext/.*\.(h|cpp)$", name)]
    included = {
        header
        for name in sources
        for header in re.findall(
            r"#include\s*<((?:torch|ATen|c10)/.*?)>", (ROOT / name).read_text()
        )
    }
    assert included
    assert [header for header in sorted(included) if not allowed.match(header)] == []


@pytest.fixture(scope="module")
def card() -> str:
    return render_card(ROOT, CONFIG)


def test_the_card_names_the_whole_api(card):
    assert "license: apache-2.0" in card
    assert f'get_kernel("org/flash-attn-norm", version={CONFIG.general.version}, ' in card
    names = set(literal_all(PACKAGE / "__init__.py"))
    assert {"flash_attn_func", "rms_norm", "layers"} <= names
    for name in names - {"layers"}:
        assert f"- `{name}`\n" in card
    for layer in ("RMSNorm", "LlamaRMSNorm", "LigerRMSNorm", "GemmaRMSNorm", "LayerNorm"):
        assert f"- `{layer}`\n" in card
    assert "{{" not in card
    assert "{%" not in card


def test_the_card_has_its_metadata_first(card):
    front = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert front is not None
    assert "library_name: kernels" in front[1]


def test_the_flake_hands_the_project_to_kernel_builder():
    text = (ROOT / "flake.nix").read_text()
    assert re.search(r'kernel-builder\.url = "github:huggingface/kernels"', text)
    assert re.search(r"kernel-builder\.lib\.genKernelFlakeOutputs\s*\{[^}]*path = \./\.;", text)
    assert text.count("{") == text.count("}")


@pytest.mark.skipif(shutil.which("nix-instantiate") is None, reason="no nix on this machine")
def test_the_flake_evaluates(tmp_path):
    expression = tmp_path / "check.nix"
    expression.write_text(
        f"""
        let
          flake = import {ROOT}/flake.nix;
          self = {{ rev = "abc"; outPath = {ROOT}; }};
          kernel-builder.lib.genKernelFlakeOutputs = arguments: arguments;
          outputs = flake.outputs {{ inherit self kernel-builder; }};
        in {{
          path = toString outputs.path;
          rev = outputs.self.rev;
          names = builtins.attrNames outputs;
        }}
        """
    )
    result = subprocess.run(
        ["nix-instantiate", "--eval", "--strict", "--json", str(expression)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "path": str(ROOT),
        "rev": "abc",
        "names": ["path", "self"],
    }
