"""What build.toml may say; every refusal names file, key and reason."""

import pytest

from tools.build_toml import read_build_toml
from tools.errors import BuildError


def test_reads_the_whole_file(project):
    config = read_build_toml(project.root)
    assert config.general.python_name == "tiny_kernel"
    assert list(config.kernels_for("cuda")) == ["answer_cuda"]
    assert config.kernel["answer_cuda"].cuda_capabilities == ["8.0+PTX", "9.0a"]
    assert config.torch.pyext == ["py"]


def test_reads_our_own():
    from tests.packaging.conftest import ROOT

    config = read_build_toml(ROOT)
    assert config.general.name == "flash-attn-norm"
    assert set(config.general.backends) == {"cpu", "cuda"}


@pytest.mark.parametrize(
    ("old", "new", "key", "reason"),
    [
        ("version = 3", "version = 3\nhomepage = 1", "general.homepage", "unknown key"),
        ("version = 3", 'version = "3"', "general.version", "valid integer"),
        ("version = 3", "version = 0", "general.version", "greater than or equal to 1"),
        ("version = 3\n", "", "general.version", "Field required"),
        ("edition = 5", "edition = 6", "general.edition", "5"),
        ('"tiny-kernel"', '"tiny_kernel"', "general.name", "match pattern"),
        ('["cpu", "cuda"]', '["cpu", "rocm"]', "general.backends.1", "'cpu' or 'cuda'"),
        ('["cpu", "cuda"]', '["cpu"]', "kernel.answer_cuda.backend", "not in general.backends"),
        ('cpu = "2.10"\n', "", "torch.stable-abi.cpu", "missing"),
        ('cpu = "2.10"', 'cpu = "2"', "torch.stable-abi.cpu", "match pattern"),
        ("depends = []", 'depends = ["cutlass_3_6"]', "kernel.answer_cpu.depends.0", "'torch'"),
        ("depends = []\n", "", "kernel.answer_cpu.depends", "Field required"),
        ('"csrc/other.cpp"', '"csrc/gone.cpp"', "kernel.answer_cpu.src", "no such file"),
        ('"csrc/other.cpp"', '"../other.cpp"', "kernel.answer_cpu.src.1", "inside the project"),
        ('"csrc/other.cpp"', '"csrc/answer.cpp"', "kernel.answer_cpu.src", "already listed"),
        ('"csrc/other.cpp"', '"build.toml"', "kernel.answer_cpu.src", "neither compiled"),
        ('"csrc/other.cpp"', '"csrc/answer.cu"', "kernel.answer_cpu.src", ".cu file"),
        ('"9.0a"', '"90"', "kernel.answer_cuda.cuda-capabilities", "'90' is not a capability"),
        (
            'cuda-capabilities = ["8.0+PTX", "9.0a"]\n',
            "",
            "kernel.answer_cuda.cuda-capabilities",
            "missing",
        ),
        (
            'include = ["csrc"]\nsrc = ["csrc/answer.cpp"',
            'cuda-flags = ["-O1"]\nsrc = ["csrc/answer.cpp"',
            "kernel.answer_cpu.cuda-flags",
            "only for backend cuda",
        ),
        (
            'src = ["csrc/answer.cpp", "csrc/other.cpp", "csrc/answer.h"]',
            "src = []",
            "kernel.answer_cpu.src",
            "at least 1 item",
        ),
    ],
)
def test_refuses(project, old, new, key, reason):
    project.replace("build.toml", old, new)
    with pytest.raises(BuildError) as error:
        read_build_toml(project.root)
    text = str(error.value)
    assert f"build.toml: {key}: " in text
    assert reason in text


def test_refuses_broken_toml(project):
    project.write("build.toml", "[general\n")
    with pytest.raises(BuildError, match=r"build.toml: .*line 1"):
        read_build_toml(project.root)


def test_refuses_a_missing_file(tmp_path):
    with pytest.raises(BuildError, match=r"build.toml: no such file"):
        read_build_toml(tmp_path)


def test_the_loader_has_the_last_word(project):
    """What only the loader's own parser refuses is shown as a refusal, too."""
    project.replace("build.toml", "https://github.com/example/tiny-kernel", "no address at all")
    with pytest.raises(BuildError, match=r"build.toml: refused by kernels 0\."):
        read_build_toml(project.root)


def test_the_command_shows_no_traceback(project):
    project.replace("build.toml", "version = 3", "version = 3\nhomepage = 1")
    result = project.build("--backend", "cpu")
    assert result.returncode == 1
    assert "general.homepage: unknown key (got 1)" in result.stderr
    assert "Traceback" not in result.stderr
