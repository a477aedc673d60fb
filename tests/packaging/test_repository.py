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
          build = builtins.fromTOML (builtins.readFile {ROOT}/build.toml);
        in {{
          version = build.general.version;
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
        "version": CONFIG.general.version,
    }


# What the pages tell users


PAGES = [ROOT / "README.md", ROOT / "CARD.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_every_call_that_is_shown_can_be_made_as_it_stands():
    """With a version or revision (huggingface/kernels#529) and the trust that a publisher needs
    whom the Hub does not list (huggingface/kernels#735)."""
    shown = [
        (page.name, call)
        for page in PAGES
        for call in re.findall(r"\b(?:get_kernel|LayerRepository)\(([^()]+)\)", page.read_text())
    ]
    assert len(shown) >= 6
    for page, call in shown:
        assert re.search(r"\b(version|revision)=", call), (page, call)
        assert "trust_remote_code=True" in call, (page, call)


def test_every_name_of_an_attention_says_which_version():
    """Transformers takes version 1 of a repository that it does not know, whatever is newest."""
    wanted = re.compile(r"@(v\d+|v\{\{ version \}\}|[0-9a-f]{4,40}\b)")
    for page in [*PAGES, *EXAMPLES]:
        names = re.findall(
            r'attn_implementation[= "]+(?:org/flash-attn-norm|\{REPO_ID\})(\S*)', page.read_text()
        )
        assert all(wanted.match(name) for name in names), (page.name, names)


def test_pages_and_examples_pin_the_version_of_this_tree():
    pins = re.compile(r'@v(\d+)|\bversion=(\d+)|"?revision"?[=:] ?"v(\d+)"')
    pages = [ROOT / "README.md", ROOT / "docs/integration.md", ROOT / "docs/distributed.md"]
    for page in [*pages, *EXAMPLES]:
        text = re.sub(r"`@v\d+`", "", page.read_text())  # what is told of other versions
        found = {int(next(filter(None, match.groups()))) for match in pins.finditer(text)}
        assert found <= {CONFIG.general.version}, page.name


def test_every_version_has_its_entry_in_the_changelog():
    """What a version adds is written down where it is pinned (huggingface/transformers#47863)."""
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = re.findall(r"^## (\d+) \(tag `v(\d+)`\)\n\n- ", text, re.MULTILINE)
    assert all(version == tag for version, tag in entries)
    versions = [int(version) for version, _ in entries]
    assert versions == list(range(len(versions), 0, -1))
    assert versions[0] >= CONFIG.general.version
