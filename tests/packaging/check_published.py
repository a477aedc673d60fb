"""What users of the published versions find: pytest tests/packaging/check_published.py.

Not part of the test run, as its name says: it wants every version of releases/ published on the Hub
that HF_ENDPOINT names, and downloads. Each step happens in a fresh process with a cold cache.
"""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
from elftools.elf.elffile import ELFFile
from releasing import ROOT

from tools.release_record import FOLDER, read_lock
from tools.verify import verify

# Before conftest.py has its say: this process asks the Hub, too.
ENDPOINT = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
LOCKS = {
    int(path.stem[1:]): read_lock(path)
    for path in sorted((ROOT / FOLDER).glob("v*.toml"), key=lambda path: int(path.stem[1:]))
}
REPO_ID = LOCKS[max(LOCKS)]["published"]["to"]
TRUST = "trust_remote_code=True"

# GQA's backward of a loaded version against the formula with repeated keys and values, in fp64; it
# may be twice as far off as the formula in the inputs' own precision.
BACKWARD = """
import torch
from kernels import get_kernel

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32

def formula(q, k, v):
    group_size = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group_size, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=device)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen.tril(k.shape[2] - q.shape[2]), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)

def gradients(function, inputs, dout):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]

def check(kernel):
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, h, 64, device=device, dtype=dtype)
              for n, h in ((33, 14), (40, 2), (40, 2))]
    dout = torch.randn(2, 33, 14, 64, device=device, dtype=dtype)
    ours = gradients(lambda *x: kernel.flash_attn_func(*x, causal=True), inputs, dout)
    plain = gradients(formula, inputs, dout)
    exact = gradients(formula, [x.double() for x in inputs], dout)
    for mine, torchs, right in zip(ours, plain, exact):
        assert mine.shape == right.shape
        error, allowed = ((x.double() - right).abs().max() for x in (mine, torchs))
        assert error <= 2 * allowed + 1e-5, (error, allowed)
    print(kernel.__name__)
"""


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


def run(*command: str | Path, home: Path, **environment: str | None) -> str:
    settings = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": ENDPOINT,
        "HF_HUB_OFFLINE": None,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "LOCAL_KERNELS": None,
    }
    result = processes.run(command, environment={**settings, **environment}, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def python(code: str, home: Path, **environment: str | None) -> str:
    return run(sys.executable, "-c", code, home=home, **environment)


def load(**pin: object) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in pin.items())
    return f"get_kernel({REPO_ID!r}, {arguments}, {TRUST})"


def ops_ids(version: int) -> set[str]:
    """The namespaces of a version's variants, one of which this machine is offered."""
    return {
        entry["library"].removesuffix(".abi3.so") for entry in LOCKS[version]["variants"].values()
    }


@pytest.mark.parametrize("version", LOCKS)
def test_every_pin(version, home):
    pins = [{"version": version}, {"revision": f"v{version}"}]
    pins += [{"revision": LOCKS[version]["published"]["commit"]}]
    names = [python(f"{BACKWARD}\ncheck({load(**pin)})", home).split() for pin in pins]
    assert names[0] == names[1] == names[2]
    assert names[0][0] in ops_ids(version)


def test_all_versions_in_one_process(home):
    """Each with its own ops, and without a symbol that the other could take."""
    loads = "\n".join(f"kernels.append({load(version=version)})" for version in LOCKS)
    code = (
        f"{BACKWARD}\nkernels = []\n{loads}\nfor kernel in kernels + kernels[::-1]: check(kernel)"
    )
    said = python(code, home).split()
    assert said[: len(LOCKS)] == said[len(LOCKS) :][::-1]
    assert len(set(said)) == len(LOCKS)
    for library in home.glob("hub/*/snapshots/*/build/*/*.abi3.so"):
        assert exported(library) == {f"PyInit_{library.name.removesuffix('.abi3.so')}"}


def exported(library: Path) -> set[str]:
    """The symbols that another build could take for its own; weak ones of libstdc++ it may."""
    with library.open("rb") as stream:
        symbols = ELFFile(stream).get_section_by_name(".dynsym").iter_symbols()
        names = {
            symbol.name
            for symbol in symbols
            if symbol["st_shndx"] != "SHN_UNDEF"
            and (symbol["st_info"]["bind"] == "STB_GLOBAL" or "flash_attn_norm" in symbol.name)
        }
    return names - {"__bss_start", "_edata", "_end"}  # the linker's own, in every library


@pytest.mark.parametrize("version", LOCKS)
def test_lock_download_and_offline(version, home, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.kernels.dependencies]\n"{REPO_ID}" = {version}\n'
    )
    command = Path(sys.executable).with_name("kernels")
    run(command, "lock", tmp_path, home=home)
    assert LOCKS[version]["published"]["commit"] in (tmp_path / "kernels.lock").read_text()
    run(command, "download", "--all-variants", tmp_path, home=home)
    # huggingface_hub remembers the whole listing and then misses the files beside build/.
    for listing in home.glob("hub/*/trees"):
        listing.rename(listing.with_name("trees.unused"))
    code = (
        f"{BACKWARD}\nfrom pathlib import Path\nfrom kernels import load_kernel\n"
        f"check(load_kernel({REPO_ID!r}, lockfile=Path({str(tmp_path / 'kernels.lock')!r})))"
    )
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert python(code, home, **nowhere).strip() in ops_ids(version)


def test_offline_after_fetching_the_snapshot(home):
    version = max(LOCKS)
    code = "from huggingface_hub import snapshot_download\n"
    code += f"snapshot_download({REPO_ID!r}, repo_type='kernel', revision='v{version}')"
    python(code, home)
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    for pin in ({"version": version}, {"revision": f"v{version}"}):
        assert python(f"{BACKWARD}\ncheck({load(**pin)})", home, **nowhere).strip()


def test_eight_processes_on_a_cold_cache(home):
    code = f"{BACKWARD}\nkernel = {load(version=max(LOCKS))}\ncheck(kernel)\nprint(kernel.__file__)"
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda _: python(code, home, OMP_NUM_THREADS="1"), range(8)))
    assert len(set(said)) == 1
    assert not list(home.glob("hub/*/blobs/*.incomplete"))
    assert len(list(home.glob("hub/*/snapshots/*"))) == 1


@pytest.mark.parametrize("version", LOCKS)
def test_verify_finds_a_changed_byte(version, home):
    code = f"from kernels import get_kernel\nprint({load(version=version)}.__file__)"
    folder = Path(python(code, home).strip()).parent
    assert verify(str(folder), ROOT).problems == []
    library = next(folder.glob("*.abi3.so")).resolve()
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    (problem,) = verify(str(folder), ROOT).problems
    assert re.search(rf"{folder.name}: File hash mismatch for \S+\.abi3\.so", problem)


def test_every_branch_is_as_it_was_built(home):
    for version in LOCKS:
        for what in (f"v{version}", LOCKS[version]["published"]["commit"]):
            command = [sys.executable, "-m", "tools.release", "verify", f"{REPO_ID}@{what}"]
            said = run(*command, home=home, PYTHONPATH=str(ROOT))
            assert said.count("files as built") == len(LOCKS[version]["variants"])


def test_a_torch_without_a_variant_is_told_why(home):
    older = 'import torch\ntorch.__version__ = type(torch.__version__)("2.9.1")\n'
    code = older + f"from kernels import get_kernel\ntry: {load(version=1)}\n"
    code += "except FileNotFoundError as error: print(error)"
    said = python(code, home)
    assert f"Cannot find a build variant for this system in {REPO_ID}" in said
    for name in LOCKS[1]["variants"]:
        assert name in said


def test_the_loaders_own_listing(home):
    said = run(Path(sys.executable).with_name("kernels"), "versions", REPO_ID, home=home)
    for version, lock in LOCKS.items():
        assert f"Version {version}:" in said
        assert all(name in said for name in lock["variants"])
