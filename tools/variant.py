"""A build variant: its names, its generated files, its layout and its metadata."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from pathlib import Path

from .build_toml import BuildToml
from .errors import BuildError
from .git import SOURCE_FOLDERS, git, is_dirty, source_state, source_trees

# Torch imports the module under the name of the ops, which differs from build to build.
_OPS_PY = '''\
import torch

from . import {ops_id}

ops = torch.ops.{ops_id}


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix an op's name with the namespace of this build."""
    return f"{ops_id}::{{op_name}}"
'''

# The name of the ops is defined here and not on the command line, so that a new name compiles anew
# only what includes this header.
_REGISTRATION_H = """\
#pragma once

#include <Python.h>

#ifndef TORCH_EXTENSION_NAME
#define TORCH_EXTENSION_NAME {ops_id}
#endif

#define FAN_CONCAT_(a, b) a##b
#define FAN_CONCAT(a, b) FAN_CONCAT_(a, b)
#define FAN_STRING_(a) #a
#define FAN_STRING(a) FAN_STRING_(a)

// Expand NAME before torch's macros paste it.
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, LIBRARY) STABLE_TORCH_LIBRARY(NAME, LIBRARY)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, KEY, LIBRARY) \\
    STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, LIBRARY)

// An empty module: importing it loads the library, whose static initializers register the ops.
#define REGISTER_EXTENSION(NAME)                                                      \\
    PyMODINIT_FUNC FAN_CONCAT(PyInit_, NAME)() {{                                      \\
        static struct PyModuleDef module = {{                                          \\
            PyModuleDef_HEAD_INIT, FAN_STRING(NAME), nullptr, 0, nullptr, nullptr,    \\
            nullptr, nullptr, nullptr}};                                               \\
        return PyModule_Create(&module);                                              \\
    }}
"""


# The oldest loader that all this is tested with. An older one then says so.
_KERNELS_MINVER = "0.17.2"


def variant_name(config: BuildToml, backend: str, cuda_version: str | None) -> str:
    """Such as torch-stable-abi210-cu130-x86_64-linux: what the loader parses and chooses by."""
    stable_abi = getattr(config.torch.stable_abi, backend).replace(".", "")
    compute = "cpu" if backend == "cpu" else f"cu{cuda_version.replace('.', '')}"
    return f"torch-stable-abi{stable_abi}-{compute}-{platform.machine()}-linux"


def ops_id(config: BuildToml, backend: str, root: Path) -> str:
    """Library, module and op namespace: unique per source tree, so two builds can share a process.

    From the git tree, not the commit: the same sources give the same name. Without git, from the
    sources' content.
    """
    tree = git(root, "rev-parse", "--short=7", "HEAD^{tree}")
    if tree is None:
        unique = f"{_content_id(root)}_dirty"
    else:
        unique = f"{tree[:7]}_dirty" if is_dirty(root) else tree[:7]
    return f"_{config.general.python_name}_{backend}_{unique}"


def _content_id(root: Path) -> str:
    digest = hashlib.sha1()
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:7]


def write_if_changed(path: Path, text: str) -> None:
    """Leaves an equal file alone, so that nothing that depends on it is rebuilt."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_registration_header(folder: Path, name: str) -> None:
    write_if_changed(folder / "registration.h", _REGISTRATION_H.format(ops_id=name))


def lay_out_variant(
    folder: Path,
    config: BuildToml,
    root: Path,
    *,
    backend: str,
    name: str,
    library: Path,
    archs: list[str],
) -> None:
    """Fills the empty `folder` with what a variant holds: package, library and metadata."""
    package = root / "torch-ext" / config.general.python_name
    suffixes = tuple(f".{extension}" for extension in config.torch.pyext)
    for source in sorted(package.rglob("*")):
        if source.suffix in suffixes and source.is_file() and source.name != "_ops.py":
            target = folder / source.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    (folder / "_ops.py").write_text(_OPS_PY.format(ops_id=name))
    shutil.copyfile(library, folder / f"{name}.abi3.so")
    metadata = _metadata(config, backend, name, archs)
    metadata["source-trees"] = source_trees(root)
    metadata["source-commit"], metadata["source-dirty"] = source_state(root)
    _write_metadata(folder, metadata)


def _metadata(config: BuildToml, backend: str, name: str, archs: list[str]) -> dict:
    general = config.general
    metadata = {
        "name": general.name,
        "id": name,
        "version": general.version,
        "license": general.license,
        "python-depends": general.python_depends,
        "kernels-minver": _KERNELS_MINVER,
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
    }
    for key in ("source", "upstream"):
        if getattr(general, key) is not None:
            metadata[key] = getattr(general, key)
    return metadata


def _write_metadata(folder: Path, metadata: dict) -> None:
    """Adds the digest of everything else in the folder; the loader's own parser has to agree."""
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    digest = Digest.hash_variant(DigestAlgorithm.SHA256, folder)
    metadata["digest"] = {"algorithm": "sha256", "files": dict(digest.files)}
    text = json.dumps(metadata, indent=2, sort_keys=True) + "\n"
    try:
        Metadata.from_bytes(text.encode())
    except Exception as error:  # the binding raises several types, all with a readable text
        raise BuildError(f"metadata.json: refused by kernels: {error}") from None
    (folder / "metadata.json").write_text(text)
