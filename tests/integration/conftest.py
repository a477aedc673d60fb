"""Where the variant under test lies, for what takes a path rather than a repository's name."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def kernel_folder(kernel) -> Path:
    """The folder of variants that the loaded kernel came from."""
    return Path(kernel.__file__).parent.parent
