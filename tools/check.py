"""All checks at the end of a build."""

from __future__ import annotations

from pathlib import Path

from .check_abi import MANYLINUX, check_library
from .check_cuda import check_cuda, read_allowed_spills, warnings_of
from .check_sass import check_sass
from .cuda_toolkit import get_cuobjdump
from .errors import BuildError
from .ninja_file import BuildPlan

SPILLS = Path("tools") / "spills.toml"


def check_build(plan: BuildPlan, root: Path, toolkit_folder: Path) -> None:
    """Checks the compiled objects and the library of the project in `root`.

    Raises:
        BuildError: naming everything that is wrong.
    """
    problems = check_library(plan.library)
    checked = ["abi3", MANYLINUX, "dependencies", "torch's stable ABI"]
    if any(step.is_cuda for step in plan.steps):
        for warning in warnings_of(plan):
            print(warning, flush=True)
        cuobjdump = get_cuobjdump(toolkit_folder)
        problems += check_cuda(plan, cuobjdump, read_allowed_spills(root / SPILLS))
        problems += check_sass(plan, cuobjdump)
        checked += ["embedded architectures", "register spills", "ptxas advice", "wgmma code"]
    if problems:
        raise BuildError("the checks found:\n" + "\n".join(f"  {problem}" for problem in problems))
    print(f"checked: {', '.join(checked)}", flush=True)
