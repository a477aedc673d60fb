"""Says whether the committed measurements are of today's sources: python -m tools.records.

A record in benchmarks/results/ is a JSON object: `trees` (git tree ids of csrc and torch-ext, from
the metadata of the variant that was measured), `device`, `torch`, `command`, `date`, `figures`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import BuildError
from .git import source_trees

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks") / "results"


class Record(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    trees: dict[str, str]
    device: str
    torch: str
    command: str
    date: str  # ISO 8601, UTC
    figures: list | dict


@dataclass(frozen=True)
class RecordState:
    path: Path
    record: Record
    stale: list[str]  # folders whose tree is another one by now


def read_records(root: Path) -> dict[Path, Record]:
    records = {}
    for path in sorted((root / RESULTS).glob("**/*.json")):
        try:
            records[path] = Record.model_validate(json.loads(path.read_text()))
        except (ValueError, ValidationError) as error:
            raise BuildError(f"{path.relative_to(root)}: {error}") from None
    return records


def record_states(root: Path) -> list[RecordState]:
    """Every record, compared with HEAD and the working tree. A benchmark rewrites its own file, so
    that each holds the newest measurement of its kind."""
    now = source_trees(root)
    return [
        RecordState(
            path, record, [name for name, tree in now.items() if record.trees.get(name) != tree]
        )
        for path, record in read_records(root).items()
    ]


def main() -> int:
    try:
        states = record_states(ROOT)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not states:
        print(f"{RESULTS}: no record")
    for state in states:
        name = state.path.relative_to(ROOT)
        what = f"changed since: {', '.join(state.stale)}" if state.stale else "up to date"
        print(f"{name} ({state.record.device}, {state.record.date}): {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
