"""get_kernel against a Hub: download, cache, offline, trust, and errors that say what to do.

The Hub is tests/loopback_hub. Every load happens in a fresh Python with its own empty cache,
because huggingface_hub and kernels read their environment when they are imported.
"""

import json
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
from loopback_hub import LoopbackHub

REPO = "acme/flash-attn-norm"
ONLINE = {"LOCAL_KERNELS": None, "HF_HUB_OFFLINE": None, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
NOWHERE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
TRUST = "trust_remote_code=True"

USE = """
import torch
q = torch.randn(1, 5, 4, 16, requires_grad=True)
k = v = torch.randn(1, 5, 2, 16)
out = kernel.flash_attn_func(q, k, v, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
).transpose(1, 2)
torch.testing.assert_close(out, expected)
out.sum().backward()
assert q.grad.isfinite().all()
print(kernel.__file__)
"""


@pytest.fixture(scope="module")
def variant(kernel) -> Path:
    """The folder of the variant that this machine's torch is offered."""
    return Path(kernel.__file__).parent


@pytest.fixture(scope="module")
def hub(variant, tmp_path_factory):
    """v1 holds our variant, v2 a variant for no machine, empty has no build at all."""
    with LoopbackHub(tmp_path_factory.mktemp("hub"), trusted_publishers=["trusted"]) as hub:
        for repo_id in (REPO, "trusted/flash-attn-norm"):
            hub.store.create_repository("kernel", repo_id)
            hub.store.add_folder("kernel", repo_id, "v1", variant, f"build/{variant.name}")
        foreign = "build/torch-stable-abi210-cu130-aarch64-linux"
        hub.store.add_folder("kernel", REPO, "v2", variant, foreign)
        hub.store.create_ref(hub.store.repository("kernel", REPO), "branch", "empty", "main")
        yield hub


@pytest.fixture
def python(hub, tmp_path):
    """Runs a piece of Python as a user of this Hub with a cold cache of their own."""

    def run(code: str, **environment):
        variables = {**ONLINE, **hub.environment(), "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        return processes.run(command, environment={**variables, **environment}, timeout=120)

    return run


def get_kernel(arguments: str, repo_id: str = REPO) -> str:
    return f"from kernels import get_kernel\nkernel = get_kernel({repo_id!r}, {arguments})\n"


def snapshots(home: Path) -> Path:
    return home / "hub" / f"kernels--{REPO.replace('/', '--')}" / "snapshots"


# What works


@pytest.mark.parametrize("which", ['revision="v1"', "version=1"])
def test_download_and_use(which, python, hub, tmp_path):
    result = python(get_kernel(f"{which}, {TRUST}") + USE)
    assert result.returncode == 0, result.stderr
    commit = hub.store.repository("kernel", REPO).resolve("v1").oid
    assert Path(result.stdout.strip()).is_relative_to(snapshots(tmp_path / "home") / commit)


def test_second_load_downloads_no_file_again(python, hub):
    assert python(get_kernel(f'revision="v1", {TRUST}')).returncode == 0
    served = len(hub.requests)
    assert python(get_kernel(f'revision="v1", {TRUST}')).returncode == 0
    later = [r for r in hub.requests[served:] if r.method == "GET" and "/resolve/" in r.path]
    assert later == []


def test_only_the_fitting_variant_is_downloaded(python, hub, variant, tmp_path):
    hub.store.add_folder(
        "kernel", REPO, "two", variant, "build/torch-stable-abi210-cu130-aarch64-linux"
    )
    hub.store.add_folder("kernel", REPO, "two", variant, f"build/{variant.name}")
    assert python(get_kernel(f'revision="two", {TRUST}')).returncode == 0
    folders = {path.parent.name for path in snapshots(tmp_path / "home").glob("*/build/*/*")}
    assert folders == {variant.name}


def test_pinned_commit_stays_when_the_branch_moves(python, hub, variant, tmp_path):
    folder = f"build/{variant.name}"
    pinned = hub.store.add_folder("kernel", REPO, "moving", variant, folder).oid
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "later.txt").write_text("a later commit")
    moved = hub.store.add_folder("kernel", REPO, "moving", tmp_path / "notes", folder).oid
    result = python(get_kernel(f"revision={pinned!r}, {TRUST}") + "print(kernel.__file__)")
    assert result.returncode == 0, result.stderr
    assert pinned in result.stdout
    assert moved not in result.stdout


def test_eight_processes_on_a_cold_cache(python, tmp_path):
    """Ranks that start at once share one cache: all succeed, with one copy of each file
    (vllm-project/llm-compressor#2984)."""
    code = get_kernel(f'revision="v1", {TRUST}') + "print(kernel.__file__)"
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(python, [code] * 8))
    assert [r.returncode for r in results] == [0] * 8, results[0].stderr
    assert len({r.stdout for r in results}) == 1
    blobs = snapshots(tmp_path / "home").parent / "blobs"
    assert not list(blobs.glob("*.incomplete"))
    assert len(list(snapshots(tmp_path / "home").iterdir())) == 1


def test_newer_torch_takes_the_stable_abi_variant(python, variant):
    """The day torch moves, the build of before still serves
    (huggingface/kernels-community#1082)."""
    newer = 'import torch\ntorch.__version__ = type(torch.__version__)("2.14.0")\n'
    result = python(newer + get_kernel(f'revision="v1", {TRUST}') + "print(kernel.__file__)")
    assert result.returncode == 0, result.stderr
    assert variant.name in result.stdout


# Offline


SNAPSHOT = f"""
from huggingface_hub import snapshot_download
snapshot_download({REPO!r}, repo_type="kernel", revision="v1")
"""


def test_offline_after_fetching_the_snapshot(python):
    """By branch and by version (huggingface/kernels#553)."""
    assert python(SNAPSHOT).returncode == 0
    for which in ('revision="v1"', "version=1"):
        result = python(get_kernel(f"{which}, {TRUST}") + USE, **NOWHERE)
        assert result.returncode == 0, result.stderr


def test_offline_after_get_kernel_alone_says_what_is_missing(python):
    """A defect of the loader, which docs/integration.md works around.

    When this fails, kernels has learned it: simplify the docs.
    """
    assert python(get_kernel(f'revision="v1", {TRUST}')).returncode == 0
    result = python(get_kernel(f'revision="v1", {TRUST}'), **NOWHERE)
    assert result.returncode != 0
    assert f"Cannot find a local snapshot for {REPO} (revision: v1)" in result.stderr


def test_local_kernels_needs_no_hub(python, variant):
    """A folder in LOCAL_KERNELS is trusted, and never asks the network."""
    local = {"LOCAL_KERNELS": f"{REPO}={variant.parent}"}
    for arguments in ('revision="v1"', "version=1"):
        result = python(get_kernel(arguments) + "print(kernel.__file__)", **NOWHERE, **local)
        assert result.returncode == 0, result.stderr
        assert Path(result.stdout.strip()).parent == variant


# Refusals


REFUSALS = {
    "no such branch": (REPO, f'revision="v7", {TRUST}', ["RevisionNotFoundError", "v7"]),
    "no such version": (
        REPO,
        f"version=7, {TRUST}",
        ["ValueError: Version 7 not found, available versions: 1"],
    ),
    "no build": (REPO, f'revision="empty", {TRUST}', ["RemoteEntryNotFoundError"]),
    "no such repository": (
        "acme/nothing-here",
        f'revision="v1", {TRUST}',
        ["RepositoryNotFoundError"],
    ),
    "neither version nor revision": (
        REPO,
        TRUST,
        ["ValueError: A kernel version or revision must be specified"],
    ),
    "no trust": (
        REPO,
        'revision="v1"',
        [f"ValueError: Kernel repository '{REPO}' is not from a trusted publisher", TRUST],
    ),
    "another one is trusted": (
        REPO,
        f'revision="v1", trust_remote_code=["{REPO}-else"]',
        ["is not from a trusted publisher", "allowlist"],
    ),
    "no variant": (
        REPO,
        f'revision="v2", {TRUST}',
        [
            f"FileNotFoundError: Cannot find a build variant for this system in {REPO}",
            "(revision: v2)",
            "torch-stable-abi210-cu130-aarch64-linux",
        ],
    ),
}


@pytest.fixture(scope="module")
def refusals(hub, tmp_path_factory) -> dict[str, str]:
    """What each refused call raised. They share a process: none of them loads anything."""
    code = """
        import json
        from kernels import get_kernel
        texts = {}
        for name, repo_id, arguments in json.loads(input()):
            try:
                eval(f"get_kernel(repo_id, {arguments})")
                texts[name] = "was not refused"
            except Exception as error:
                texts[name] = f"{type(error).__name__}: {error}"
        print(json.dumps(texts))
    """
    calls = [(name, repo_id, arguments) for name, (repo_id, arguments, _) in REFUSALS.items()]
    home = {"HF_HOME": str(tmp_path_factory.mktemp("home"))}
    result = processes.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        environment={**ONLINE, **hub.environment(), **home},
        stdin=json.dumps(calls) + "\n",
    )
    assert result.returncode == 0, result.stderr
    return json.loads(processes.last_line(result.stdout))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name, refusals):
    """Among them what surprised users: trust (huggingface/kernels#735), and a call that names
    neither version nor revision (huggingface/kernels#529)."""
    for text in REFUSALS[name][2]:
        assert text in refusals[name]


def test_older_torch_is_refused_with_the_reason(python, variant):
    """A line for each variant (huggingface/kernels#436)."""
    older = 'import torch\ntorch.__version__ = type(torch.__version__)("2.9.1")\n'
    result = python(older + get_kernel(f'revision="v1", {TRUST}'))
    assert result.returncode != 0
    assert f"Cannot find a build variant for this system in {REPO}" in result.stderr
    assert variant.name in result.stderr


def test_cuda_torch_is_not_offered_a_cpu_variant(python, hub, variant, tmp_path):
    """Also without a GPU: the reason why CUDA variants hold the CPU kernels as well."""
    name = "torch-stable-abi210-cpu-x86_64-linux"
    hub.store.add_folder("kernel", REPO, "cpu-only", variant, f"build/{name}")
    claim = 'import torch\ntorch.version.cuda = "13.0"\n'
    result = python(claim + get_kernel(f'revision="cpu-only", {TRUST}'))
    assert result.returncode != 0
    assert f"Cannot find a build variant for this system in {REPO}" in result.stderr
    assert name in result.stderr


@pytest.mark.parametrize(
    ("arguments", "repo_id"),
    [
        ('revision="v1"', "trusted/flash-attn-norm"),
        (f'revision="v1", trust_remote_code=["{REPO}"]', REPO),
    ],
)
def test_trust_without_the_blanket_flag(arguments, repo_id, python):
    result = python(get_kernel(arguments, repo_id))
    assert result.returncode == 0, result.stderr


TRANSFORMERS = f"""
import tempfile
from transformers import AutoModelForCausalLM, KernelConfig, Qwen3Config
from transformers.utils import kernel_config
kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64)
heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
folder = tempfile.mkdtemp()
AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
layer = ("{REPO}:LlamaRMSNorm", {{"version": 1, "trust_remote_code": True}})
config = KernelConfig({{"RMSNorm": layer}}, inherit_mapping=False)
def load(name="{REPO}@v1", **arguments):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name, **arguments)
"""


@pytest.mark.parametrize("arguments", ["", "trust_remote_code=True"])
def test_transformers_refuses_an_untrusted_kernel(arguments, python):
    """trust_remote_code is about model code and does not reach kernels."""
    result = python(TRANSFORMERS + f"load({arguments})")
    assert result.returncode != 0
    assert "is not from a trusted publisher" in result.stderr


def test_transformers_loads_with_its_own_flag(python):
    code = "load(allow_all_kernels=True, kernel_config=config, use_kernels=True)"
    result = python(TRANSFORMERS + f"print({code}.config._attn_implementation)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{REPO}@v1"


def test_transformers_own_name_with_a_local_kernel(python, variant):
    """huggingface/transformers#45399: without the flash-attn package, "flash_attention_2" is a
    repository of the Hub, in whose place a build of ours may be put."""
    show = """
model = load("flash_attention_2")
from transformers import modeling_flash_attention_utils
print(model.config._attn_implementation, modeling_flash_attention_utils._flash_fn.__module__)
"""
    local = {"LOCAL_KERNELS": f"kernels-community/flash-attn2={variant.parent}"}
    result = python(TRANSFORMERS + show, **NOWHERE, **local)
    assert result.returncode == 0, result.stderr
    implementation, module = result.stdout.split()
    assert implementation == "kernels-community/flash-attn2"
    assert module.endswith(".attention")
    assert "flash_attn_norm" in module
