"""Publishes variants as one checked commit, and checks what was published.

    python -m tools.release                        what a release would change: nothing is written
    python -m tools.release --publish              do it
    python -m tools.release --to ../store          to a folder instead of a Hub repository
    python -m tools.release verify WHAT            WHAT: a folder, org/name, or org/name@revision

A Hub's address and token are those of huggingface_hub: HF_ENDPOINT, HF_TOKEN, `hf auth login`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .build_toml import read_build_toml
from .errors import BuildError
from .git import git
from .release_collect import collect
from .release_plan import Plan, compare_with_target
from .release_record import write_lock
from .release_target import FileId, HubTarget, Target, open_target
from .verify import verify

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return options.run(options)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    is_verify = bool(arguments) and arguments[0] == "verify"
    name = "verify" if is_verify else "release"
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.{'release verify' if is_verify else 'release'}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    if is_verify:
        parser.add_argument("what", help="a folder, org/name, or org/name@revision")
        parser.add_argument(
            "--lock", type=Path, help="the record to hold it against, default releases/v<N>.toml"
        )
    else:
        parser.add_argument(
            "--to",
            metavar="WHERE",
            help="org/name, or a folder (with / or ./ in front); default: "
            "general.hub.repo-id of build.toml",
        )
        parser.add_argument("--publish", action="store_true", help="do it")
        parser.add_argument(
            "--build-dir",
            type=Path,
            help="folder of the variants; default build/, or the commit's in dist/",
        )
        parser.add_argument("--commit", help="where the variants come from, default HEAD")
        parser.add_argument(
            "--keep",
            metavar="VARIANT",
            action="append",
            default=[],
            help="leave this variant of an older torch line on the branch, and say so there",
        )
        parser.add_argument(
            "--rebuild-older",
            action="store_true",
            help="renew a published version although a higher one is published",
        )
        parser.add_argument(
            "--create-repository", action="store_true", help="make the Hub repository if need be"
        )
    options = parser.parse_args(arguments[1:] if is_verify else arguments)
    options.run = {"verify": _verify, "release": _release}[name]
    options.root = options.root.resolve()
    return options


def _release(options: argparse.Namespace) -> int:
    build_dir = (options.build_dir or _built_at(options.root, options.commit)).resolve()
    where = options.to or read_build_toml(options.root).general.hub.repo_id
    if where is None:
        raise BuildError("build.toml: general.hub.repo-id is missing; say --to WHERE")
    release = collect(options.root, build_dir, options.commit)
    target = open_target(where)
    if options.create_repository and isinstance(target, HubTarget):
        if options.publish:
            target.create_repository()
        else:
            target.may_be_missing = True
    plan = compare_with_target(
        release, target, keep=options.keep, rebuild_older=options.rebuild_older
    )
    print("\n".join(plan.lines))
    if plan.problems:
        problems = "\n".join(f"  {problem}" for problem in plan.problems)
        raise BuildError(f"not released:\n{problems}")
    if not options.publish:
        print("dry run: nothing was written; PUBLISH=1, or --publish, does it")
        return 0
    _publish(plan, options.root)
    return 0


def _built_at(root: Path, commit: str | None) -> Path:
    """Where `make matrix` has put the variants of this commit."""
    full = git(root, "rev-parse", "--verify", f"{commit}^{{commit}}") if commit else None
    folder = root / "dist" / (full or "")[:12]
    return folder if full and folder.is_dir() else root / "build"


def _publish(plan: Plan, root: Path) -> None:
    release, target = plan.release, plan.target
    for move in plan.moves:
        commit = target.move(move)
        print(f"{move.branch}: now at {commit}", flush=True)
    target.tidy(release.branch)
    head = target.branches()[release.branch]
    _check_published(target, head, plan)
    record = {**release.record(), "published": {**target.address(), "commit": head}}
    path = write_lock(root, record)
    print(f"{path.relative_to(root)} written; commit it: it is the record of what was published")


def _check_published(target: Target, head: str, plan: Plan) -> None:
    """Reads the branch again: what stands there must be the release, file by file."""
    found = target.files(head)
    wrong = [
        path
        for path, content in plan.release.contents().items()
        if path not in found or not FileId.of(content).same_as(found[path])
    ]
    if wrong:
        raise BuildError(f"{target}: not as released: {', '.join(wrong[:5])}; run it again")


def _verify(options: argparse.Namespace) -> int:
    report = verify(options.what, options.root, options.lock)
    print("\n".join(report.lines))
    if report.problems:
        problems = "\n".join(f"  {problem}" for problem in report.problems)
        raise BuildError(f"{options.what} is not as it was built:\n{problems}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
