"""The CUDA checks: every spill listed with its size, no wgmma warning, the asked architectures."""

import subprocess

import pytest

from tests.packaging.conftest import ROOT
from tools.archs import Arch
from tools.check import SPILLS
from tools.check_cuda import (
    AllowedSpill,
    KernelFigures,
    check_cuda,
    compare_spills,
    embedded_archs,
    read_allowed_spills,
    read_figures,
)
from tools.cuda_toolkit import get_cuobjdump, get_toolkit
from tools.errors import BuildError
from tools.ninja_file import BuildPlan, CompileStep

# 64 live values in at most 32 registers: whatever the compiler does, some go to memory.
SPILLING_KERNEL = """
__global__ void __launch_bounds__(1024, 2) crowded(float* x) {
    float a[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) a[i] = x[i * 7 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i * 9 + threadIdx.x] = a[i] * a[(i * 3 + 1) % 64];
}
"""


@pytest.fixture(scope="module")
def toolkit():
    return get_toolkit("13.0", ROOT / ".toolkit")


@pytest.fixture(scope="module")
def cuobjdump():
    return get_cuobjdump(ROOT / ".toolkit")


@pytest.fixture
def plan(tmp_path, toolkit):
    """Compiles a kernel for some architectures and returns the build it would be part of."""

    def compile_kernel(text: str, built: list[str], asked: list[str]) -> BuildPlan:
        source = tmp_path / "kernel.cu"
        source.write_text(text)
        archs = [Arch.parse(arch) for arch in asked]
        step = CompileStep(str(source), tmp_path / "kernel.o", "kernel", [], archs)
        gencode = [flag for arch in built for flag in Arch.parse(arch).gencode_flags()]
        command = [str(toolkit.nvcc), "-Xptxas=-v", *gencode, "-c", str(source)]
        result = subprocess.run(
            [*command, "-o", str(step.object)],
            capture_output=True,
            text=True,
            check=True,
            env=toolkit.environment(),
        )
        step.log.write_text(result.stdout + result.stderr)
        return BuildPlan([step], tmp_path / "library.so", [], toolkit)

    return compile_kernel


def allowed(kernel: str, size: int, arch: str = "8.0") -> AllowedSpill:
    return AllowedSpill(kernel=kernel, cuda="13.0", arch=arch, bytes=size, reason="for this test")


def test_finds_a_spill(plan, cuobjdump):
    build = plan(SPILLING_KERNEL, ["8.0"], ["8.0"])
    (problem,) = check_cuda(build, cuobjdump, [])
    figures = read_figures(build.steps[0].log.read_text())
    assert figures == [KernelFigures("crowded", "8.0", 32, figures[0].spill_bytes)]
    size = figures[0].spill_bytes
    assert size > 0
    assert problem == f"crowded for 8.0 spills {size} bytes, allowed: 0"

    assert check_cuda(build, cuobjdump, [allowed("crowded", size)]) == []
    (grown,) = check_cuda(build, cuobjdump, [allowed("crowded", size - 4)])
    assert grown == f"crowded for 8.0 spills {size} bytes, allowed: {size - 4}"
    # An entry for another compiler or another architecture says nothing of this build.
    other = AllowedSpill(kernel="gone", cuda="13.2", arch="8.0", bytes=4, reason="for this test")
    (problem,) = check_cuda(build, cuobjdump, [other, allowed("gone", 4, "9.0")])
    assert problem.startswith("crowded")


def test_finds_a_listed_spill_that_vanished():
    figures = [KernelFigures("a", "8.0", 64, 0)]
    assert compare_spills(figures, [allowed("a", 8)]) == [
        "spills.toml allows a for 8.0 8 bytes, but: 0 bytes now"
    ]
    assert compare_spills(figures, [allowed("b", 8)]) == [
        "spills.toml allows b for 8.0 8 bytes, but: no such kernel"
    ]


def test_finds_missing_and_superfluous_code(plan, cuobjdump):
    kernel = "__global__ void scale(float* x) { x[threadIdx.x] *= 2; }"
    build = plan(kernel, ["8.0+PTX", "9.0a"], ["8.0+PTX", "9.0a"])
    assert embedded_archs(build.steps[0].object, cuobjdump) == {"8.0", "9.0a", "PTX 8.0"}
    assert check_cuda(build, cuobjdump, []) == []

    (problem,) = check_cuda(plan(kernel, ["8.0"], ["8.0+PTX", "9.0"]), cuobjdump, [])
    assert problem.endswith("embeds 8.0, build.toml asks for 8.0, 9.0, PTX 8.0")
    (problem,) = check_cuda(plan(kernel, ["8.0", "12.0"], ["8.0"]), cuobjdump, [])
    assert problem.endswith("embeds 12.0, 8.0, build.toml asks for 8.0")


def test_finds_advice_of_ptxas(plan, cuobjdump):
    build = plan("__global__ void scale(float* x) { x[threadIdx.x] *= 2; }", ["9.0a"], ["9.0a"])
    advice = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are"
    with build.steps[0].log.open("a") as log:
        log.write(f"{advice} serialized\n")
    (problem,) = check_cuda(build, cuobjdump, [])
    assert advice in problem


def test_reads_template_names_without_parameters():
    log = (
        "ptxas info    : Compiling entry function "
        "'_ZN5space6kernelINS_6ConfigILi128EEELb1EEEvPKf' for 'sm_90a'\n"
        "ptxas info    : Function properties for _ZN5space6kernelINS_6ConfigILi128EEELb1EEEvPKf\n"
        "    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    (figures,) = read_figures(log)
    assert figures.kernel == "space::kernel<space::Config<128>, true>"
    assert (figures.arch, figures.registers, figures.spill_bytes) == ("9.0a", 168, 32)


def test_our_list_of_spills_is_valid():
    assert (ROOT / SPILLS).is_file()
    for entry in read_allowed_spills(ROOT / SPILLS):
        Arch.parse(entry.arch)


def test_a_spill_without_a_reason_is_refused(tmp_path):
    path = tmp_path / "spills.toml"
    path.write_text('[[spill]]\nkernel = "a"\ncuda = "13.0"\narch = "8.0"\nbytes = 8\n')
    with pytest.raises(BuildError, match="reason"):
        read_allowed_spills(path)
