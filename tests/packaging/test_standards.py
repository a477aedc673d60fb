"""The sources are valid in the other C++ standard that kernel-builder may choose, too."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

from tests.packaging.conftest import ROOT
from tools.build_toml import read_build_toml
from tools.ninja_file import cxx_standard, make_plan
from tools.variant import write_registration_header


def test_sources_are_valid_in_the_other_standard(tmp_path):
    """C++17 with torch before 2.12, C++20 from there on."""
    other = {"c++17": "c++20", "c++20": "c++17"}[cxx_standard()]
    write_registration_header(tmp_path / "generated", "_ops")
    plan = make_plan(read_build_toml(ROOT), ROOT, tmp_path, backend="cpu", archs={}, toolkit=None)

    def messages(step) -> str:
        flags = [f"-std={other}" if flag.startswith("-std=") else flag for flag in step.flags]
        command = ["g++", *flags, "-O0", "-fsyntax-only", "-pedantic-errors", step.source]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr

    with ThreadPoolExecutor(2) as threads:
        found = [text for text in threads.map(messages, plan.steps) if "error" in text]
    assert not found, "\n".join(found)
