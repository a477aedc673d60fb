"""Stands in for two programs of a CUDA 12.6 toolkit, whose own ones are not on PyPI: nvcc, by
translating its options for clang, and fatbinary, by translating clang's options for CUDA 13's.

Run by the scripts that clang_gate.py writes into its toolkit folder.
"""

from __future__ import annotations

import os
import re
import sys

CLANG = "clang++-19"
_NATIVE = re.compile(r"-gencode=arch=compute_\w+,code=(sm_\w+)")
_NVCC_ONLY = re.compile(r"-gencode=|--expt-|-Xptxas|--threads|-lineinfo|--ptxas-options")
_IMAGE = re.compile(r"--image=profile=(sm|compute)_(\w+),file=(.*)")


def clang_options(nvcc_options: list[str], cuda_root: str) -> list[str]:
    """Compiles as nvcc would; without the PTX, which the gate has no use for."""
    options = ["-x", "cuda", f"--cuda-path={cuda_root}"]
    # clang 19 has not been tested with 12.6, and takes parameters marked __grid_constant__ by copy.
    options += ["-Wno-unknown-cuda-version", "-Wno-ignored-attributes"]
    for option in nvcc_options:
        native = _NATIVE.fullmatch(option)
        if native is not None:
            options.append(f"--offload-arch={native[1]}")
        elif option.startswith("-Xcompiler="):
            host = option.removeprefix("-Xcompiler=").split(",")
            options += [flag for flag in host if flag != "-fno-gnu-unique"]  # GCC's alone
        elif _NVCC_ONLY.match(option) is None:
            options.append(option)
    return options


def fatbinary_options(clang_options: list[str]) -> list[str]:
    """CUDA 13 wants the kind and the number of an image where clang gives one profile."""
    options = []
    for option in clang_options:
        image = _IMAGE.fullmatch(option)
        if image is not None:
            kind = "elf" if image[1] == "sm" else "ptx"
            option = f"--image3=kind={kind},sm={image[2]},file={image[3]}"
        options.append(option)
    return options


def main() -> None:
    """clang_as_nvcc.py nvcc CUDA_ROOT OPTIONS, or: fatbinary PROGRAM OPTIONS"""
    program, path, *options = sys.argv[1:]
    if program == "fatbinary":
        os.execv(path, [path, *fatbinary_options(options)])
    elif options == ["--version"]:
        print(f"{CLANG} for CUDA, release 12.6")
    else:
        os.execvp(CLANG, [CLANG, *clang_options(options, path)])


if __name__ == "__main__":
    main()
