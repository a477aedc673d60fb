"""Checks of a finished library: that it loads wherever its variant's name says it does."""

from __future__ import annotations

import re
from pathlib import Path

from elftools.elf.elffile import ELFFile
from kernel_abi_check import ObjectFile

from .symbols import demangle

MANYLINUX = "manylinux_2_28"
# The newest versions of symbols that it allows (PEP 600; auditwheel's policy of that name).
_NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
PYTHON_ABI = "3.9"

# torch and the CUDA runtime come with torch itself; the rest is any manylinux system's.
_NEEDED = {
    "libtorch.so",
    "libtorch_cpu.so",
    "libc10.so",
    "libcudart.so.12",
    "libcudart.so.13",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libc.so.6",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
# Imports without a symbol version that need no promise of torch's C++ classes: Python's C API,
# torch's C shim, and the C++ runtime, of which libc10 exports unversioned copies.
_UNVERSIONED_OK = re.compile(
    r"^(_?Py|aoti_torch_|torch_|_ZN?[KRO]*St|_ZNK?9__gnu_cxx|_Z(TI|TS|TV|TT|GV)N?K?S[tsaiod]"
    r"|_ZNK?S[sabiod]|_ZT[ISV]N10__cxxabiv|_Zn[wa]|_Zd[la]|__cxa_|__gxx_|_Unwind_|_ITM_|__gmon_start__)"
)


def check_library(path: Path) -> list[str]:
    """What is wrong with the library; empty when nothing is."""
    problems = _check_limits(path)
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        foreign = [name for name in _unversioned_imports(elf) if not _UNVERSIONED_OK.match(name)]
        problems += [text for text in _too_new_imports(elf) if text not in problems]
    problems += [
        f"depends on {name}, which not every system with torch has"
        for name in needed
        if name not in _NEEDED
    ]
    problems += [
        f"imports {name}, which is outside torch's stable ABI or defined by no source"
        for name in demangle(foreign)
    ]
    return problems


def _check_limits(path: Path) -> list[str]:
    object_file = ObjectFile(str(path))
    problems = [
        f"{MANYLINUX}: needs {violation.name} of {violation.dep}_{violation.version}"
        for violation in object_file.check_manylinux(MANYLINUX)
    ]
    problems += [
        f"Python's stable ABI {PYTHON_ABI}: uses {violation.name}"
        for violation in object_file.check_python_abi(PYTHON_ABI)
    ]
    return problems


def _too_new_imports(elf: ELFFile) -> list[str]:
    """What is newer than ``_NEWEST``; kernel_abi_check misses functions of libm."""
    needs = elf.get_section_by_name(".gnu.version_r")
    if needs is None:
        return []
    too_new = {}
    for _, versions in needs.iter_versions():
        for version in versions:
            family, _, number = version.name.rpartition("_")
            if family not in _NEWEST or not re.fullmatch(r"[\d.]+", number):
                continue  # GLIBC_PRIVATE and the like
            if tuple(map(int, number.split("."))) > _NEWEST[family]:
                too_new[version["vna_other"]] = version.name
    of_symbol = elf.get_section_by_name(".gnu.version")
    symbols = enumerate(elf.get_section_by_name(".dynsym").iter_symbols())
    imports = [(symbol.name, of_symbol.get_symbol(index)["ndx"]) for index, symbol in symbols]
    return [
        f"{MANYLINUX}: needs {name} of {too_new[version]}"
        for name, version in imports
        if version in too_new
    ]


def _unversioned_imports(elf: ELFFile) -> list[str]:
    symbols = elf.get_section_by_name(".dynsym")
    versions = elf.get_section_by_name(".gnu.version")
    names = []
    for index, symbol in enumerate(symbols.iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF" or not symbol.name:
            continue
        version = versions.get_symbol(index)["ndx"] if versions is not None else "VER_NDX_GLOBAL"
        if version in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL"):
            names.append(symbol.name)
    return names
