"""What a release would be: collected from build/ and git, and checked."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .api_surface import Surface, compare, merge
from .build_toml import BuildToml, read_build_toml
from .built import BuiltVariant, differences, read_variants
from .card import render_card
from .check_abi import check_library
from .errors import BuildError
from .gate_record import GateRecord, read_records
from .git import git
from .release_record import ON_BRANCH, lock_path, newest_lock
from .release_target import Content


@dataclass
class Release:
    """Everything that a release would publish; `problems` must be empty before it may."""

    root: Path
    version: int
    commit: str
    variants: list[BuiltVariant]
    records: dict[str, list[GateRecord]]
    left_out: dict[str, str]  # variant: why
    api: Surface
    api_changes: list[str]  # since the newest release
    card: str
    benchmarks: dict[str, bytes]
    problems: list[str]
    kept: dict[str, dict] = field(default_factory=dict)  # older torch lines left on the branch

    @property
    def branch(self) -> str:
        return f"v{self.version}"

    def record(self) -> dict:
        """What releases/ and the branch keep of it."""
        return {
            "version": self.version,
            "commit": self.commit,
            "api": self.api,
            "variants": {
                variant.name: {
                    "digest": variant.digest,
                    "library": variant.library.name,
                    "library-sha256": variant.library_sha256,
                    "archs": variant.archs,
                    "bytes": variant.size,
                    "gate": [_gate_entry(record) for record in self.records[variant.name]],
                }
                for variant in self.variants
            },
            "left-out": self.left_out,
            "kept-from-older-releases": self.kept,
        }

    def contents(self) -> dict[str, Content]:
        """The files of the version's branch that are the release's own."""
        files: dict[str, Content] = dict(self.benchmarks)
        for variant in self.variants:
            for name, path in variant.files().items():
                files[f"build/{variant.name}/{name}"] = path
        text = json.dumps(self.record(), indent=2, sort_keys=True) + "\n"
        return {**files, ON_BRANCH: text.encode()}


def _gate_entry(record: GateRecord) -> dict:
    entry = record.to_dict()
    for key in ("api", "variant", "digest", "library", "library_sha256", "commit"):
        del entry[key]  # said once for the variant, or equal for all
    return {key.replace("_", "-"): value for key, value in entry.items() if value is not None}


def collect(root: Path, build_dir: Path, commit: str | None = None) -> Release:
    """Reads what would be released. Problems are gathered, so that one run shows them all.

    Args:
        commit: where the variants must come from; HEAD if not given.

    Raises:
        BuildError: there is nothing to make a release of.
    """
    head = git(root, "rev-parse", "--verify", f"{commit or 'HEAD'}^{{commit}}")
    if head is None:
        raise BuildError(f"{root}: {commit or 'HEAD'} names no commit; a release comes from git")
    all_variants = read_variants(build_dir)
    if not all_variants:
        raise BuildError(f"{build_dir}: no variants there; run `make matrix` first")
    problems = []
    with _checked_out(root, head) as source:
        config = read_build_toml(source)
        card = render_card(source, config)
        benchmarks = {
            path.relative_to(source).as_posix(): path.read_bytes()
            for path in sorted((source / "benchmarks").glob("benchmark*.py"))
        }
    problems += _tree_problems(root, lock_path(root, config.general.version))
    problems += _origin_problems(all_variants, head, config)

    variants, records, left_out = [], {}, {}
    for variant in all_variants:
        problems += _file_problems(variant)
        found, foreign = read_records(variant)
        failed = [record for record in found if not record.passed]
        problems += [f"{variant.name}: its gate {record.summary()}" for record in failed]
        if found:
            variants.append(variant)
            records[variant.name] = found
        else:
            left_out[variant.name] = "no gate record" + "".join(f"; {why}" for why in foreign)
    if not variants:
        problems.append(
            "no variant has a gate record; run `make gate VARIANT=...` for each: "
            + ", ".join(f"{name} ({why})" for name, why in left_out.items())
        )
    api, api_problems = _agreed_api(records)
    problems += api_problems
    changes, bump_problems = api_changes(root, config.general.version, api)
    return Release(
        root=root,
        version=config.general.version,
        commit=head,
        variants=variants,
        records=records,
        left_out=left_out,
        api=api,
        api_changes=changes,
        card=card,
        benchmarks=benchmarks,
        problems=problems + bump_problems,
    )


@contextmanager
def _checked_out(root: Path, commit: str) -> Iterator[Path]:
    """The commit's files, in a folder that goes away. What is published comes from nowhere else."""
    command = ["git", "-C", str(root), "archive", "--format=tar", commit]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode != 0:
        raise BuildError(f"git archive {commit}: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        try:
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
                tar.extractall(folder, filter="data")
        except OSError as error:
            raise BuildError(f"{folder}: {error}; nothing was released") from None
        yield Path(folder)


def _tree_problems(root: Path, lock: Path) -> list[str]:
    """The lock does not count: a run that is repeated finds the one that it wrote itself."""
    excluded = f":(exclude){lock.relative_to(root)}"
    status = git(root, "status", "--porcelain", "--untracked-files=all", "--", ".", excluded)
    changed = (status or "").splitlines()
    if not changed:
        return []
    names = ", ".join(line[2:].strip() for line in changed[:5])
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    return [f"the working tree is dirty ({names}{more}); commit, or put it away"]


def _origin_problems(variants: list[BuiltVariant], commit: str, config: BuildToml) -> list[str]:
    problems = []
    for variant in variants:
        if variant.is_dirty:
            problems.append(f"{variant.name}: built from a tree with changes that are in no commit")
        if variant.version < 1:
            problems.append(f"{variant.name}: version {variant.version}; versions start with 1")
        elif variant.version != config.general.version:
            problems.append(
                f"{variant.name}: version {variant.version}, but build.toml of the commit says "
                f"{config.general.version}"
            )
    origins = {str(variant.commit)[:12] for variant in variants}
    if len(origins) > 1:
        listing = ", ".join(f"{v.name} from {str(v.commit)[:12]}" for v in variants)
        problems.append(f"the variants come from different commits: {listing}; run `make matrix`")
    elif origins != {commit[:12]}:
        problems.append(
            f"the variants come from {origins.pop()}, not from {commit[:12]}; run `make matrix`, "
            "or name their commit with COMMIT=..."
        )
    return problems


def _file_problems(variant: BuiltVariant) -> list[str]:
    problems = [f"{variant.name}: {difference}" for difference in differences(variant)]
    if not variant.library.is_file():
        return [*problems, f"{variant.name}: {variant.library.name} is missing"]
    return problems + [f"{variant.name}: {problem}" for problem in check_library(variant.library)]


def _agreed_api(records: dict[str, list[GateRecord]]) -> tuple[Surface, list[str]]:
    """The surface of all variants together; they must not differ."""
    measured = [(name, record.api) for name, found in records.items() for record in found]
    measured = [(name, api) for name, api in measured if api]
    if not measured:
        return {"all": []}, ["no gate record holds an API surface"] if records else []
    first_name, first = measured[0]
    problems = [
        f"{name} and {first_name} differ in their API: {'; '.join(changes)}"
        for name, api in measured[1:]
        if (changes := compare(first, api))
    ]
    return merge([api for _, api in measured]), problems


def api_changes(root: Path, version: int, api: Surface) -> tuple[list[str], list[str]]:
    """What has changed since the newest release up to this version, and what is wrong with that."""
    newest = newest_lock(root, up_to=version)
    if newest is None:
        return [], []
    number, lock = newest
    changes = compare(lock["api"], api)
    if changes and number == version:
        return changes, [
            f"the API differs from that of v{version}, which is published "
            f"({'; '.join(changes)}); raise general.version in build.toml"
        ]
    return changes, []
