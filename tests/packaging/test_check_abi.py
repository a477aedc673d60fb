"""The library checks catch what would make a variant fail on somebody else's machine."""

import platform
import subprocess

import pytest

from tools.check_abi import check_library


@pytest.fixture
def library(tmp_path):
    """Compiles C++ text to a shared library."""

    def compile_library(text: str, *flags: str):
        source = tmp_path / "library.cpp"
        source.write_text(text)
        path = tmp_path / "library.abi3.so"
        command = ["g++", "-shared", "-fPIC", "-o", str(path), str(source), *flags]
        subprocess.run(command, check=True)
        return path

    return compile_library


def test_accepts_what_torch_and_python_promise(library):
    path = library(
        """
        #include <stdexcept>
        #include <string>
        extern "C" int aoti_torch_get_dim(void*, long*);
        extern "C" void* PyModule_GetName(void*);
        extern "C" void* PyInit_library() {
            long dim;
            if (aoti_torch_get_dim(nullptr, &dim) != 0) throw std::invalid_argument("x");
            return PyModule_GetName(nullptr);
        }
        """
    )
    assert check_library(path) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "namespace c10 { struct Device { void type(); }; } void f() { c10::Device().type(); }",
            "imports c10::Device::type(), which is outside torch's stable ABI",
        ),
        (
            "namespace at { int num_threads(); } int f() { return at::num_threads(); }",
            "imports at::num_threads(), which is outside torch's stable ABI",
        ),
        (
            "void forgotten(); void f() { forgotten(); }",
            "imports forgotten(), which is outside torch's stable ABI or defined by no source",
        ),
        (
            'extern "C" void* PyUnicode_AsUTF8AndSize(void*, long*);'
            "void* f() { return PyUnicode_AsUTF8AndSize(nullptr, nullptr); }",
            "Python's stable ABI 3.9: uses PyUnicode_AsUTF8AndSize",
        ),
        (
            'extern "C" void* PyThreadState_GetDict();'
            'extern "C" void* _PyObject_Vectorcall(void*);'
            "void* f() { return _PyObject_Vectorcall(nullptr); }",
            "Python's stable ABI 3.9: uses _PyObject_Vectorcall",
        ),
    ],
)
def test_finds_imports_outside_the_promises(library, text, problem):
    assert any(found.startswith(problem) for found in check_library(library(text)))


def test_finds_a_foreign_dependency(library):
    path = library("void f() {}", "-Wl,--no-as-needed", "-lresolv")
    assert check_library(path) == [
        "depends on libresolv.so.2, which not every system with torch has"
    ]


@pytest.mark.skipif(
    tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 34),
    reason="this libc is not newer than the limit",
)
def test_finds_a_libc_symbol_that_is_too_new(library):
    path = library("#include <dlfcn.h>\nvoid* f() { return dlopen(nullptr, RTLD_NOW); }")
    assert "manylinux_2_28: needs dlopen of GLIBC_2.34" in check_library(path)


@pytest.mark.skipif(
    tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 29),
    reason="this libc is not newer than the limit",
)
def test_finds_a_libm_symbol_that_is_too_new(library):
    """huggingface/lerobot#2219: a library that asks for a newer glibc than the machine has."""
    path = library("#include <cmath>\ndouble f(double x) { return std::exp2(x); }", "-lm")
    assert check_library(path) == ["manylinux_2_28: needs exp2 of GLIBC_2.29"]
