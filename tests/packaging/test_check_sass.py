"""The check of machine code: a Hopper kernel without wgmma or without the copy engine is found."""

import re
import subprocess

import pytest

from tests.packaging.conftest import ROOT
from tools.archs import Arch
from tools.check_sass import HOPPER_SOURCES, check_sass, count_instructions
from tools.cuda_toolkit import get_cuobjdump, get_toolkit
from tools.ninja_file import BuildPlan, CompileStep

KERNELS = """
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
using namespace flash_attn_norm::ptx;

__global__ void both(float* x, const __grid_constant__ CUtensorMap map) {
    float d[16];
    const uint32_t a[4] = {1, 2, 3, 4};
    tma_load_4d(0, &map, 8, 0, 0, 0, 0);
    wgmma_fence();
    Wgmma<WgmmaType::kBf16, 32>::ss<Major::kContraction, Major::kContraction>(d, 1, 2, 0);
    Wgmma<WgmmaType::kF16, 32>::rs<Major::kOuter>(d, a, 2, 1);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    for (int i = 0; i < 16; ++i) x[i] = d[i];
}
"""
HOPPER_SOURCE = "csrc/attention/sm90/fwd_hdim128.cu"
OTHER_KERNEL = "__global__ void neither(float* x) { x[threadIdx.x] *= 2.0f; }\n"


@pytest.fixture(scope="module")
def cuobjdump():
    return get_cuobjdump(ROOT / ".toolkit")


def compiled(folder, text: str, source: str):
    """A build of one file for sm_90a that claims to come from `source`."""
    toolkit = get_toolkit("13.0", ROOT / ".toolkit")
    arch = Arch.parse("9.0a")
    file, target = folder / "kernel.cu", folder / "kernel.o"
    file.write_text(text)
    command = [
        str(toolkit.nvcc),
        "-std=c++17",
        "--expt-relaxed-constexpr",
        f"-I{ROOT / 'csrc'}",
        *arch.gencode_flags(),
    ]
    command += ["-c", str(file), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, env=toolkit.environment())
    assert result.returncode == 0, result.stderr
    step = CompileStep(source, target, "kernel", [], [arch])
    return BuildPlan([step], folder / "library.so", [], toolkit)


def test_instructions_are_counted(tmp_path, cuobjdump):
    build = compiled(tmp_path, KERNELS + OTHER_KERNEL, HOPPER_SOURCE)
    counts = count_instructions(build.steps[0].object, cuobjdump)
    assert counts["both"] == {"HGMMA": 2, "UTMALDG": 1}
    assert counts["neither"] == {}


def test_hopper_kernels_without_them_are_found(tmp_path, cuobjdump):
    build = compiled(tmp_path, KERNELS + OTHER_KERNEL, HOPPER_SOURCE)
    assert check_sass(build, cuobjdump) == ["neither has no HGMMA and no UTMALDG"]


@pytest.mark.parametrize("source", ["sm80/fwd_hdim128.cu", "sm90/bwd_passes.cu"])
def test_other_sources_may_do_without(tmp_path, cuobjdump, source):
    build = compiled(tmp_path, OTHER_KERNEL, f"csrc/attention/{source}")
    assert check_sass(build, cuobjdump) == []


def test_kernels_without_products_still_need_the_copy_engine(tmp_path, cuobjdump):
    build = compiled(tmp_path, OTHER_KERNEL, "csrc/attention/decode/sm90a/bulk_hdim64.cu")
    assert check_sass(build, cuobjdump) == ["neither has no UTMALDG"]


def test_every_source_that_launches_hopper_kernels_is_checked():
    """Such kernels and what launches them stand in headers of the same two folders."""
    header = re.compile(r'#include "attention/(decode/sm90a|sm90)/\w+_(launch|kernel)\.cuh"')
    folders = (ROOT / "csrc/attention/sm90", ROOT / "csrc/attention/decode/sm90a")
    sources = [path for folder in folders for path in folder.glob("*.cu")]
    launching = {path for path in sources if header.search(path.read_text())}
    assert launching == {path for pattern in HOPPER_SOURCES for path in ROOT.glob(pattern)}
    assert ROOT / HOPPER_SOURCE in launching
