"""Readable names of C++ symbols."""

from __future__ import annotations

import subprocess


def demangle(names: list[str], *, parameters: bool = True) -> list[str]:
    """As the source writes them; a name that is no C++ symbol stays as it is."""
    if not names:
        return []
    command = ["c++filt"] if parameters else ["c++filt", "--no-params"]
    result = subprocess.run(
        command, input="\n".join(names), capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()
