"""What git says about the sources."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE_FOLDERS = ("csrc", "torch-ext")


def git(root: Path, *arguments: str) -> str | None:
    """The command's output, or None when there is no git, no repository or no such object."""
    command = ["git", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def is_dirty(root: Path, *paths: str) -> bool:
    """True when a tracked file differs from HEAD, or a folder of sources holds an untracked one."""
    untracked = [path for path in (paths or SOURCE_FOLDERS) if path in SOURCE_FOLDERS]
    return bool(
        git(root, "status", "--porcelain", "--untracked-files=no", "--", *paths)
        or git(root, "ls-files", "--others", "--exclude-standard", "--", *untracked)
    )


def source_trees(root: Path) -> dict[str, str]:
    """Tree ids of the folders that make a variant; marked when the working tree differs."""
    trees = {}
    for folder in SOURCE_FOLDERS:
        tree = git(root, "rev-parse", f"HEAD:{folder}") or "unknown"
        trees[folder] = f"{tree}+changes" if is_dirty(root, folder) else tree
    return trees


def source_state(root: Path) -> tuple[str | None, bool]:
    """The commit that the sources come from, and whether they differ from it.

    A new file in the source folders counts: Python files there go into a variant as they are.
    """
    commit = git(root, "rev-parse", "HEAD")
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "--", *SOURCE_FOLDERS)
    return commit, commit is None or is_dirty(root) or bool(untracked)
