"""csrc/common/check.cu with a CUDA runtime that fails: what users read where nothing runs."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# A device of capability 12.1 under a driver for CUDA 13.0.
RUNTIME = """
#pragma once
#define CUDART_VERSION 13020
enum cudaError_t {
    cudaSuccess, cudaErrorInvalidValue, cudaErrorNoKernelImageForDevice,
    cudaErrorInvalidDeviceFunction, cudaErrorUnsupportedPtxVersion, cudaErrorInvalidPtx
};
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
inline cudaError_t cudaGetDevice(int* device) { *device = 3; return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 12 : 1;
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "what CUDA says"; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfThisTest"; }
inline cudaError_t cudaGetLastError() { return cudaErrorInvalidValue; }
"""

MAIN = """
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include "common/check.h"
int main(int, char** arguments) {
    try {
        flash_attn_norm::check_cuda(static_cast<cudaError_t>(std::atoi(arguments[1])), "a_kernel");
    } catch (const std::runtime_error& error) {
        std::cout << error.what();
    }
}
"""


@pytest.fixture(scope="module")
def message(tmp_path_factory):
    """What an error of this number raises; the numbers are those of the runtime above."""
    folder = tmp_path_factory.mktemp("cuda_errors")
    (folder / "cuda_runtime_api.h").write_text(RUNTIME)
    (folder / "main.cpp").write_text(MAIN)
    command = ["c++", "-std=c++17", "-Wall", "-Werror", "-D__CUDA_ARCH_LIST__=800,860,900"]
    command += [f"-I{folder}", f"-I{ROOT / 'csrc'}", "-x", "c++", str(folder / "main.cpp")]
    command += [str(ROOT / "csrc/common/check.cu"), "-o", str(folder / "program")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

    def run(status: int) -> str:
        program = [str(folder / "program"), str(status)]
        return subprocess.run(program, capture_output=True, text=True, check=True).stdout

    return run


@pytest.mark.parametrize("status", [2, 3, 4, 5])
def test_a_device_or_driver_that_the_build_has_nothing_for(message, status):
    """sgl-project/sglang#38980, vllm-project/vllm#47397, Dao-AILab/flash-attention#1785"""
    assert message(status) == (
        "a_kernel: what CUDA says (cudaErrorOfThisTest); this build holds no code for device 3 "
        "(compute capability 12.1) under a driver for CUDA 13.0, it was built for 8.0, 8.6, 9.0 by "
        "CUDA 13.2"
    )


def test_other_errors_are_told_as_they_are(message):
    assert message(0) == ""
    assert message(1) == "a_kernel: what CUDA says (cudaErrorOfThisTest)"
