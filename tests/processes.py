"""Commands in processes of their own that cannot outlive the test."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str | None] | None = None,
    stdin: str = "",
    timeout: float = 240,
) -> subprocess.CompletedProcess:
    """Runs a command to its end and captures its output as text.

    Args:
        environment: changes to this process's environment; None takes a variable away.
        stdin: what the command reads.
        timeout: seconds; then the command and all that it started are killed.
    """
    variables = dict(os.environ)
    for name, value in (environment or {}).items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    arguments = [str(part) for part in command]
    process = subprocess.Popen(
        arguments,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout)
    finally:
        # The session's group holds whatever launchers started, also after they died themselves.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def kill_session(leader: int) -> None:
    """Kills a process that started a session, and all that belongs to it."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process: the folders, then what this process was given."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )


def last_line(text: str) -> str:
    """The last line with something in it: of a traceback, the exception and its message."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
