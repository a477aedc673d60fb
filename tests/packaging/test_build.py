"""The builder on a small project: what it leaves, what it compiles again, what it refuses."""

import json
import re
import subprocess
import sys

import pytest
from kernels._rust import Digest, DigestAlgorithm, Metadata

CPU_VARIANT = "torch-stable-abi210-cpu-x86_64-linux"
CUDA_VARIANT = "torch-stable-abi210-cu130-x86_64-linux"


def compiled(result: subprocess.CompletedProcess) -> list[str]:
    """The sources that a build compiled, from its progress lines: [k/n, seconds] source."""
    assert result.returncode == 0, result.stdout + result.stderr
    pattern = r"^\[\d+/\d+, [\d.]+ s\] (\S+\.(?:cpp|cu))\b"
    return sorted(re.findall(pattern, result.stdout, re.MULTILINE))


def test_cpu_variant(project):
    result = project.build("--backend", "cpu")
    assert compiled(result) == ["csrc/answer.cpp", "csrc/other.cpp", "torch-ext/torch_binding.cpp"]
    assert "[4/4, " in result.stdout
    assert "checked: abi3, manylinux_2_28" in result.stdout
    assert re.search(rf"{CPU_VARIANT}: \d\.\d\d MB", result.stdout)

    assert project.variants() == [CPU_VARIANT]
    folder = project.root / "build" / CPU_VARIANT
    metadata = Metadata.read_from_file(folder / "metadata.json")
    assert re.fullmatch(r"_tiny_kernel_cpu_[0-9a-f]{7}_dirty", metadata.id)
    assert (metadata.version, metadata.backend.archs) == (3, None)
    expected = {"__init__.py", "_ops.py", "metadata.json", f"{metadata.id}.abi3.so"}
    assert {path.name for path in folder.iterdir()} == expected
    assert metadata.digest.files == Digest.hash_variant(DigestAlgorithm.SHA256, folder).files
    assert metadata.digest.files


def test_the_loader_loads_it(project):
    assert project.build("--backend", "cpu").returncode == 0
    script = (
        "import pathlib, sys; from kernels import get_local_kernel\n"
        "kernel = get_local_kernel(pathlib.Path(sys.argv[1]), backend='cpu')\n"
        "print(kernel.name('op'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(project.root)], capture_output=True, text=True
    )
    assert re.fullmatch(r"_tiny_kernel_cpu_\w{7}_dirty::op\n", result.stdout), result.stderr


def test_compiles_only_what_changed(project):
    project.commit()
    project.write("csrc/answer.h", "#pragma once\nint answer();\nint unused();\n")
    project.build("--backend", "cpu")
    again = project.build("--backend", "cpu")
    assert compiled(again) == []
    assert "no work to do" in again.stdout

    project.write("csrc/answer.h", "#pragma once\nint answer();\n\n")
    assert compiled(project.build("--backend", "cpu")) == ["csrc/answer.cpp"]

    src = 'src = ["csrc/answer.cpp"'
    project.replace("build.toml", src, f'cxx-flags = ["-g0"]\n{src}')
    assert compiled(project.build("--backend", "cpu")) == ["csrc/answer.cpp", "csrc/other.cpp"]


def test_a_new_name_of_the_ops_compiles_only_their_registration(project):
    first = project.commit()
    assert f"ops _tiny_kernel_cpu_{first}\n" in project.build("--backend", "cpu").stdout
    project.write("torch-ext/tiny_kernel/other.py", "")
    dirty = project.build("--backend", "cpu")
    assert f"ops _tiny_kernel_cpu_{first}_dirty\n" in dirty.stdout
    assert compiled(dirty) == ["torch-ext/torch_binding.cpp"]
    second = project.commit()
    clean = project.build("--backend", "cpu")
    assert f"ops _tiny_kernel_cpu_{second}\n" in clean.stdout
    assert compiled(clean) == ["torch-ext/torch_binding.cpp"]


def test_a_failed_compile_leaves_no_variant(project):
    project.write("csrc/other.cpp", "int other() { return nothing; }\n")
    result = project.build("--backend", "cpu")
    assert result.returncode == 1
    assert re.search(r"g\+\+ .*-c csrc/other\.cpp", result.stdout)
    assert re.search(r"csrc/other\.cpp:1:\d+: error: .nothing. was not declared", result.stdout)
    assert "error: the build failed" in result.stderr
    assert project.variants() == []


def test_a_failed_cuda_compile_shows_the_message(project):
    project.replace("csrc/answer.cu", "x[threadIdx.x]", "y[threadIdx.x]")
    result = project.build("--backend", "cuda")
    assert result.returncode == 1
    assert re.search(r"nvcc .*-c csrc/answer\.cu", result.stdout)
    assert 'csrc/answer.cu(1): error: identifier "y" is undefined' in result.stdout
    assert project.variants() == []


def test_a_failed_check_leaves_no_variant(project):
    project.write("csrc/other.cpp", "int missing();\nint other() { return missing(); }\n")
    project.replace("csrc/answer.h", "int answer();", "int answer();\nint other();")
    project.write("csrc/answer.cpp", '#include "answer.h"\nint answer() { return other(); }\n')
    project.write(
        "torch-ext/torch_binding.cpp",
        '#include "registration.h"\nint answer();\nint used = answer();\n'
        "REGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n",
    )
    result = project.build("--backend", "cpu")
    assert result.returncode == 1
    assert "imports missing(), which" in result.stderr
    assert project.variants() == []


def test_says_which_compiler_is_missing(project, tmp_path):
    (tmp_path / "empty").mkdir()
    result = project.build("--backend", "cpu", environment={"PATH": str(tmp_path / "empty")})
    assert result.returncode == 1
    assert "error: g++ is not on the path" in result.stderr


def test_builds_into_another_folder(project, tmp_path):
    result = project.build("--backend", "cpu", "--out", str(tmp_path / "elsewhere"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "elsewhere" / CPU_VARIANT / "metadata.json").is_file()
    assert project.variants() == []


def test_cuda_variant(project):
    result = project.build("--backend", "cuda", "--cuda", "13.0")
    assert compiled(result) == ["csrc/answer.cu", "torch-ext/torch_binding.cpp"]
    assert "architectures 8.0+PTX 9.0a;" in result.stdout
    folder = project.root / "build" / CUDA_VARIANT
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": ["8.0+PTX", "9.0a"]}

    assert compiled(project.build("--backend", "cuda")) == []
    only = project.build("--backend", "cuda", "--archs", "9.0a")
    assert compiled(only) == ["csrc/answer.cu"]
    assert "architectures 9.0a;" in only.stdout


def test_a_kernel_that_has_none_of_the_archs_asked_for(project):
    """It serves other devices, but the library is linked with it; the build says so."""
    project.write("csrc/older.cu", "__global__ void older() {}\n")
    section = '\n[kernel.older_cuda]\nbackend = "cuda"\ndepends = []\ninclude = ["csrc"]\n'
    section += 'cuda-capabilities = ["8.6", "8.0+PTX"]\nsrc = ["csrc/older.cu"]\n'
    project.write("build.toml", (project.root / "build.toml").read_text() + section)
    result = project.build("--backend", "cuda", "--archs", "9.0a")
    assert result.returncode == 0, result.stderr
    assert "kernel.older_cuda: has none of 9.0a; built for 8.0 alone" in result.stdout
    assert "architectures 9.0a;" in result.stdout
    metadata = json.loads((project.root / "build" / CUDA_VARIANT / "metadata.json").read_text())
    assert metadata["backend"]["archs"] == ["9.0a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--archs", "9.9"], "--archs 9.9: nvcc 13.0 does not know 9.9"),
        (["--archs", "ninety"], "--archs ninety: 'ninety' is not a capability"),
        (["--archs", "10.0"], "--archs 10.0: no section of build.toml lists 10.0"),
        (["--cuda", "11.8"], "--cuda 11.8: no CUDA 11.8 toolkit is installed"),
        (["--for-this-torch"], "--for-this-torch chooses backend and CUDA version itself"),
    ],
)
def test_refuses_on_the_command_line(project, arguments, message):
    result = project.build("--backend", "cuda", *arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert project.variants() == []


def test_a_kernel_left_with_no_arch_is_an_error(project):
    """Nothing falls back to an older architecture in silence (huggingface/kernels#590)."""
    project.replace("build.toml", '"8.0+PTX", "9.0a"', '"3.5"')
    result = project.build("--backend", "cuda")
    assert result.returncode == 1
    assert "kernel.answer_cuda: no capability left of 3.5 that CUDA 13.0 knows" in result.stderr


def test_leaves_out_an_arch_that_the_toolkit_lacks(project):
    project.replace("build.toml", '"8.0+PTX", "9.0a"', '"7.0", "8.0"')
    result = project.build("--backend", "cuda")
    assert result.returncode == 0, result.stderr
    assert "architectures 8.0;" in result.stdout


@pytest.mark.parametrize(
    ("torch_cuda", "expected"),
    [
        (None, CPU_VARIANT),
        ("13.0", CUDA_VARIANT),
        ("13.1", CUDA_VARIANT),
        ("13.2", "torch-stable-abi210-cu132-x86_64-linux"),
        ("12.8", None),
    ],
)
def test_for_this_torch(torch_cuda, expected, project, monkeypatch):
    """The builder and the loader agree on what a torch is offered, GPU or not."""
    import torch

    from tools import cuda_toolkit
    from tools.build_toml import read_build_toml
    from tools.errors import BuildError
    from tools.offered import offered_variant
    from tools.variant import variant_name

    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(cuda_toolkit, "_installed_roots", list)
    config = read_build_toml(project.root)
    if expected is None:
        with pytest.raises(BuildError, match=r"cu130.* is not compatible with system CUDA"):
            offered_variant(config)
    else:
        assert variant_name(config, *offered_variant(config)) == expected
