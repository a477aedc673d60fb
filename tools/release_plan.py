"""A release beside what its target holds: the moves of the branches, and the diff for people."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from .api_surface import compare
from .git import git
from .release_collect import Release
from .release_record import ON_BRANCH, newest_lock
from .release_target import Content, FileId, Move, Target

_OURS = re.compile(r"^(build/|benchmarks/|release\.json$)")  # what a release owns on its branch


@dataclass
class Plan:
    """A release beside what its target holds now."""

    release: Release
    target: Target
    moves: list[Move]
    lines: list[str]  # the diff, for people
    problems: list[str]


def compare_with_target(
    release: Release, target: Target, *, keep: list[str], rebuild_older: bool
) -> Plan:
    """Makes up the moves of the branches and tells them. Changes nothing, here or there."""
    branches = target.branches()
    head = branches.get(release.branch)
    before = target.files(head) if head else {}
    old = json.loads(target.read(head, ON_BRANCH)) if ON_BRANCH in before else None
    problems = list(release.problems)
    problems += _downgrades(release, branches, old, rebuild_older)
    if head and old is None:
        problems.append(
            f"{target}: {release.branch} was not made by `make release` ({ON_BRANCH} is missing), "
            "so that its API is unknown; raise general.version, or delete the branch"
        )
    if old is not None and (changes := compare(old["api"], release.api)):
        text = (
            f"the API differs from that of {release.branch} at {target} ({'; '.join(changes)}); "
            "raise general.version in build.toml"
        )
        problems.append(text)
    on_branch = sorted({path.split("/")[1] for path in before if path.startswith("build/")})
    problems += _keep(release, keep, on_branch, old)
    after = release.contents()
    move = _version_move(release, head, before, after)
    moves = [move] if move.add or move.delete else []
    moves += _card_move(release, target, branches)
    lines = _tell(release, target, old, on_branch, moves)
    return Plan(release, target, moves, lines, problems)


def _downgrades(
    release: Release, branches: dict[str, str], old: dict | None, rebuild_older: bool
) -> list[str]:
    problems = []
    published = [int(name[1:]) for name in branches if re.fullmatch(r"v\d+", name)]
    newest = newest_lock(release.root)
    highest = max([*published, *([newest[0]] if newest else [])], default=0)
    if release.version < highest and not (rebuild_older and release.version in published):
        problems.append(
            f"a downgrade: version {release.version}, but v{highest} is published; to rebuild a "
            "published older version say --rebuild-older"
        )
    if old is not None and old["commit"] != release.commit:
        is_older = (
            git(release.root, "merge-base", "--is-ancestor", release.commit, old["commit"])
            is not None
        )
        if is_older:
            problems.append(
                f"a downgrade: {release.branch} holds {old['commit'][:12]}, which is newer than "
                f"{release.commit[:12]}"
            )
    return problems


def _torch_line(name: str) -> str:
    """torch-stable-abi210-cu130-x86_64-linux -> torch-stable-abi210."""
    return re.match(r"torch-stable-abi\d+|[^-]+", name)[0]


def _keep(release: Release, keep: list[str], on_branch: list[str], old: dict | None) -> list[str]:
    """Notes the variants that stay although this release does not replace them."""
    problems = []
    lines = {_torch_line(variant.name) for variant in release.variants}
    for name in keep:
        if name not in on_branch:
            problems.append(f"--keep {name}: {release.branch} has no such variant")
        elif _torch_line(name) in lines:
            problems.append(
                f"--keep {name}: of the same torch line as this release; only older lines may "
                "stay, or one branch serves two builds of one line side by side"
            )
        else:
            known = {**(old or {}).get("variants", {})}
            entry = known.get(name, {"digest": "unknown"})
            earlier = (old or {}).get("kept-from-older-releases", {}).get(name)
            release.kept[name] = earlier or {
                "commit": (old or {}).get("commit", "unknown"),
                "digest": entry["digest"],
            }
    return problems


def _version_move(
    release: Release, head: str | None, before: dict[str, FileId], after: dict[str, Content]
) -> Move:
    add = {
        path: content
        for path, content in after.items()
        if path not in before or not FileId.of(content).same_as(before[path])
    }
    kept = tuple(f"build/{name}/" for name in release.kept)
    delete = [
        path
        for path in before
        if _OURS.match(path) and path not in after and not path.startswith(kept or ("\0",))
    ]
    title = f"Release {release.branch} from {release.commit[:12]}"
    return Move(release.branch, title, add, delete, head)


def _card_move(release: Release, target: Target, branches: dict[str, str]) -> list[Move]:
    """The card describes the newest version, so an older one does not touch it."""
    published = [int(name[1:]) for name in branches if re.fullmatch(r"v\d+", name)]
    if any(number > release.version for number in published):
        return []
    head = branches.get("main")
    card = release.card.encode()
    before = target.files(head).get("README.md") if head else None
    if before is not None and FileId.of(card).same_as(before):
        return []
    return [Move("main", f"Card of {release.branch}", {"README.md": card}, [], head)]


def _tell(
    release: Release, target: Target, old: dict | None, on_branch: list[str], moves: list[Move]
) -> list[str]:
    lines = [f"{target}: {release.branch} from commit {release.commit[:12]}"]
    published = (old or {}).get("variants", {})
    for variant in release.variants:
        if variant.name not in on_branch:
            what = "added"
        elif published.get(variant.name, {}).get("digest") == variant.digest:
            what = "unchanged"
        else:
            what = "replaced"
        before = published.get(variant.name, {}).get("bytes")
        was = f", was {before / 1e6:.2f}" if before not in (None, variant.size) else ""
        lines.append(f"  {what:10} {variant.name}  {variant.size / 1e6:.2f} MB{was}")
        lines += [f"             {record.summary()}" for record in release.records[variant.name]]
    new = {variant.name for variant in release.variants}
    for name in on_branch:
        if name in release.kept:
            lines.append(f"  kept       {name}  from {release.kept[name]['commit'][:12]}")
        elif name not in new:
            lines.append(f"  removed    {name}")
    lines += [f"  left out   {name}  {why}" for name, why in release.left_out.items()]
    if old is None and not release.api_changes:
        count = len(release.api["all"])
        lines.append(f"  API        {count} public names, first record of them")
    else:
        lines += [f"  API        {change}" for change in release.api_changes or ["no change"]]
    for move in moves:
        size = sum(FileId.of(content).size for content in move.add.values())
        lines.append(
            f"  commit on {move.branch}: {len(move.add)} files to write ({size / 1e6:.2f} MB), "
            f"{len(move.delete)} to delete"
        )
    if not moves:
        lines.append("  nothing to do: the branches hold this already")
    return lines
