"""What was released: releases/v<N>.toml in the repository, release.json on the branch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from pathlib import Path

from .errors import BuildError

FOLDER = "releases"
ON_BRANCH = "release.json"


def lock_path(root: Path, version: int) -> Path:
    return root / FOLDER / f"v{version}.toml"


def read_lock(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BuildError(f"{path}: {error}") from None


def newest_lock(root: Path, up_to: int | None = None) -> tuple[int, dict] | None:
    """The lock of the highest version, at most `up_to`; None when nothing is published yet."""
    versions = [
        int(match[1])
        for path in (root / FOLDER).glob("v*.toml")
        if (match := re.fullmatch(r"v(\d+)\.toml", path.name))
    ]
    versions = [version for version in versions if up_to is None or version <= up_to]
    if not versions:
        return None
    return max(versions), read_lock(lock_path(root, max(versions)))


def write_lock(root: Path, record: dict) -> Path:
    """Writes releases/v<version>.toml, all of it or nothing."""
    path = lock_path(root, record["version"])
    incoming = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        incoming.write_text(_HEADER + to_toml(record))
        incoming.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            incoming.unlink()
        raise BuildError(
            f"{path}: {error}; the branch is published, running the release again writes this file"
        ) from None
    return path


_HEADER = "# Written by `make release`; what a published version holds. Not edited by hand.\n\n"


def to_toml(table: dict, prefix: str = "") -> str:
    """TOML of nested dictionaries of strings, numbers, truth values and lists of them."""
    plain = {key: value for key, value in table.items() if not _is_table(value)}
    text = "".join(f"{_key(key)} = {_value(value)}\n" for key, value in plain.items())
    for key, value in table.items():
        path = f"{prefix}{_key(key)}"
        for entry in value if isinstance(value, list) else [value]:
            if _is_table(value):
                bracket = "[[{}]]" if isinstance(value, list) else "[{}]"
                text += f"\n{bracket.format(path)}\n{to_toml(entry, f'{path}.')}"
    return text


def _is_table(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict)
    return isinstance(value, dict)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    return json.dumps(value, ensure_ascii=False)
