"""Variants as they lie in a folder: what they say of themselves, and whether their files agree.

Every file of a variant but metadata.json has its sha256 in metadata.json; so the sha256 of
metadata.json alone, here called the variant's digest, stands for all of them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

METADATA = "metadata.json"


@dataclass(frozen=True)
class BuiltVariant:
    """One folder of `build/`."""

    folder: Path
    metadata: dict
    digest: str  # sha256 of metadata.json

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def version(self) -> int:
        return self.metadata["version"]

    @property
    def ops_id(self) -> str:
        return self.metadata["id"]

    @property
    def backend(self) -> str:
        return self.metadata["backend"]["type"]

    @property
    def archs(self) -> list[str]:
        return self.metadata["backend"].get("archs", [])

    @property
    def commit(self) -> str | None:
        """The commit that it was built from; None without git, and from before it was noted."""
        return self.metadata.get("source-commit")

    @property
    def is_dirty(self) -> bool:
        return self.metadata.get("source-dirty", True)

    @property
    def library(self) -> Path:
        return self.folder / f"{self.ops_id}.abi3.so"

    @property
    def library_sha256(self) -> str:
        return sha256_of(self.library)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(path.stat().st_size for path in self.files().values())

    def files(self) -> dict[str, Path]:
        """What is published of it, by path inside the variant."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                found[path.relative_to(self.folder).as_posix()] = path
        return found


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_variant(folder: Path) -> BuiltVariant:
    """Reads the metadata of one variant; the loader's own parser has to accept it.

    Raises:
        BuildError: it is no variant.
    """
    from kernels._rust import Metadata

    path = folder / METADATA
    try:
        text = path.read_bytes()
        Metadata.from_bytes(text)
        metadata = json.loads(text)
    except FileNotFoundError:
        raise BuildError(f"{folder}: no variant there: {METADATA} is missing") from None
    except Exception as error:  # the binding raises several types, all with a readable text
        raise BuildError(f"{path}: {error}") from None
    return BuiltVariant(folder, metadata, hashlib.sha256(text).hexdigest())


def read_variants(folder: Path) -> list[BuiltVariant]:
    """All variants in `folder`, by name. Folders of other names are none."""
    from kernels.variants import get_variants_local

    names = sorted(variant.variant_str for variant in get_variants_local(folder))
    return [read_variant(folder / name) for name in names]


def find_variants(path: Path) -> list[BuiltVariant]:
    """The variants of a variant's folder, of a `build/`, or of a folder that holds a `build/`."""
    if not path.is_dir():
        raise BuildError(f"{path}: no such folder")
    if (path / METADATA).is_file():
        return [read_variant(path)]
    return read_variants(path / "build") or read_variants(path)


def differences(variant: BuiltVariant) -> list[str]:
    """Which files are not those that metadata.json was written for; empty when all are."""
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    written = Metadata.from_bytes((variant.folder / METADATA).read_bytes()).digest
    if written is None:
        return [f"{METADATA} holds no digest"]
    try:
        written.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant.folder))
    except DigestValidationError as error:
        return [str(violation) for violation in error.violations]
    return []
