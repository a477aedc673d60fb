"""Finds files that are not those that were built, in a folder or at a revision of a repository.

The loader does not look at digests when it loads, so this is how a tampered or damaged file shows.
Two records are used: metadata.json of each variant, which lies beside the files, and the committed
releases/v<N>.toml, which whoever changed the files cannot have changed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .built import BuiltVariant, differences, find_variants
from .errors import BuildError
from .release_record import lock_path, read_lock
from .release_target import HubTarget


@dataclass
class Report:
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def verify(what: str, root: Path, lock: Path | None = None) -> Report:
    """Compares variants with their metadata and with the record of their release.

    Args:
        what: a variant's folder, a folder that holds variants, `org/name` (its newest version) or
            `org/name@revision`.
        root: the project, for releases/.
        lock: a record to use instead.
    """
    path = Path(what).expanduser()
    if path.exists() or what.startswith(("/", "./", "../", "~")):
        return _verify_folder(path, root, lock)
    repo_id, _, revision = what.partition("@")
    target = HubTarget(repo_id)
    if not revision:
        versions = [n for n in target.branches() if n[:1] == "v" and n[1:].isdigit()]
        if not versions:
            raise BuildError(f"{target}: no version branch; say {repo_id}@REVISION")
        revision = max(versions, key=lambda name: int(name[1:]))
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        report = _verify_folder(target.download(revision, Path(folder)), root, lock, whole=True)
    report.lines.insert(0, f"{target} at {revision}")
    return report


def _verify_folder(folder: Path, root: Path, lock: Path | None, whole: bool = False) -> Report:
    """`whole`: all variants of the release must be there, as they need not in somebody's cache."""
    variants = find_variants(folder)
    if not variants:
        raise BuildError(f"{folder}: no variants there")
    report = Report()
    locks: dict[int, dict | None] = {}
    for variant in variants:
        if variant.version not in locks:
            locks[variant.version] = _find_lock(variant.version, root, lock)
            if locks[variant.version] is None:
                report.lines.append(
                    f"no releases/v{variant.version}.toml: held against metadata.json only"
                )
        found = differences(variant) + _against_lock(variant, locks[variant.version])
        report.problems += [f"{variant.name}: {problem}" for problem in found]
        count = len(variant.files())
        state = f"{len(found)} problems" if found else f"{count} files as built"
        report.lines.append(f"{variant.name}: {state}")
    if whole:
        present = {variant.name for variant in variants}
        for released in filter(None, locks.values()):
            gone = sorted({*released["variants"]} - present)
            report.problems += [f"{name}: released, but missing" for name in gone]
    return report


def _find_lock(version: int, root: Path, given: Path | None) -> dict | None:
    path = given or lock_path(root, version)
    if given is None and not path.is_file():
        return None
    return read_lock(path)


def _against_lock(variant: BuiltVariant, lock: dict | None) -> list[str]:
    if lock is None:
        return []
    kept = lock.get("kept-from-older-releases", {})
    entry = lock["variants"].get(variant.name) or kept.get(variant.name)
    if entry is None:
        return [f"the release of v{lock['version']} has no such variant"]
    if entry["digest"] != variant.digest:
        return [
            f"metadata.json is not that of the release of v{lock['version']} "
            f"(sha256 {variant.digest[:12]}, released: {entry['digest'][:12]})"
        ]
    return []
