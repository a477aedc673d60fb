"""The check of machine code: a Hopper kernel without wgmma or without the copy engine is found."""

import re
import subprocess
from dataclasses import replace

import pytest

from tests.packaging.conftest import ROOT
from tools.archs import Arch
from tools.check_sass import (
    HOPPER_SOURCES,
    check_sass,
    count_instructions,
    product_sequences,
)
from tools.cuda_toolkit import get_cuobjdump, get_toolkit
from tools.ninja_file import BuildPlan, CompileStep

KERNELS = """
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
using namespace flash_attn_norm::ptx;

__device__ void issue_scores(float (&s)[16]) {
    wgmma_fence();
    Wgmma<WgmmaType::kBf16, 32>::ss<Major::kContraction, Major::kContraction>(s, 1, 2, 0);
    wgmma_commit_group();
}

__device__ void issue_register_scores(float (&s)[16]) {
    const uint32_t q[4] = {5, 6, 7, 8};
    wgmma_fence();
    Wgmma<WgmmaType::kBf16, 32>::rs<Major::kContraction>(s, q, 2, 0);
    wgmma_commit_group();
}

__device__ void issue_output(float (&o)[16]) {
    const uint32_t p[4] = {1, 2, 3, 4};
    wgmma_fence();
    Wgmma<WgmmaType::kBf16, 32>::rs<Major::kOuter>(o, p, 2, 0);
    wgmma_commit_group();
}

__global__ void both(float* x, const __grid_constant__ CUtensorMap map) {
    float s[16], o[16];
    tma_load_4d(0, &map, 8, 0, 0, 0, 0);
    issue_scores(s);
    issue_output(o);
    wgmma_wait_group<1>();
    for (int i = 0; i < 16; ++i) x[i] = s[i];
    wgmma_wait_group<0>();
    for (int i = 0; i < 16; ++i) x[16 + i] = o[i];
}
"""
Q_IN_REGISTERS = KERNELS.replace("both(", "registers(").replace(
    "    issue_scores(s);", "    issue_register_scores(s);"
)
ONE_AFTER_THE_OTHER = """
__global__ void serial(float* x, const __grid_constant__ CUtensorMap map) {
    float s[16], o[16];
    tma_load_4d(0, &map, 8, 0, 0, 0, 0);
    issue_scores(s);
    wgmma_wait_group<0>();
    issue_output(o);
    wgmma_wait_group<0>();
    for (int i = 0; i < 16; ++i) x[i] = s[i] + o[i];
}
"""
HOPPER_SOURCE = "csrc/attention/sm90/fwd_hdim128.cu"
BACKWARD_SOURCE = "csrc/attention/sm90/bwd_hdim128.cu"
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


def test_products_and_waits_are_read_in_their_order(tmp_path, cuobjdump):
    build = compiled(tmp_path, KERNELS + ONE_AFTER_THE_OTHER, HOPPER_SOURCE)
    sequences = product_sequences(build.steps[0].object, cuobjdump)
    assert {name: re.sub(r"(.)\1+", r"\1", text) for name, text in sequences.items()} == {
        "both": "sr10",
        "serial": "s0r0",
    }


def test_scores_of_queries_in_registers_are_scores(tmp_path, cuobjdump):
    build = compiled(tmp_path, Q_IN_REGISTERS, HOPPER_SOURCE)
    (sequence,) = product_sequences(build.steps[0].object, cuobjdump).values()
    assert re.sub(r"(.)\1+", r"\1", sequence) == "sr10"
    assert check_sass(build, cuobjdump) == []


def test_forward_kernels_whose_products_wait_for_each_other_are_found(tmp_path, cuobjdump):
    build = compiled(tmp_path, KERNELS + ONE_AFTER_THE_OTHER, HOPPER_SOURCE)
    assert check_sass(build, cuobjdump) == ["serial has no step with both products in flight"]
    build.steps[0] = replace(build.steps[0], source=BACKWARD_SOURCE)
    assert check_sass(build, cuobjdump) == []


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
