"""CUDA architectures as build.toml, nvcc and metadata.json write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"^(\d+)\.(\d)([af]?)(\+PTX)?$")


@dataclass(frozen=True, order=True)
class Arch:
    """A capability such as 8.0, 9.0a or 8.0+PTX."""

    major: int
    minor: int
    suffix: str = ""  # "a": this device only, "f": this family only
    ptx: bool = False  # embed PTX as well, for devices newer than every listed one

    @classmethod
    def parse(cls, text: str) -> Arch:
        match = _PATTERN.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not a capability such as 8.0, 9.0a or 8.0+PTX")
        return cls(int(match[1]), int(match[2]), match[3], match[4] is not None)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def digits(self) -> str:
        """As nvcc writes it: 90a."""
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def without_ptx(self) -> Arch:
        return Arch(self.major, self.minor, self.suffix)

    def gencode_flags(self) -> list[str]:
        native = f"-gencode=arch=compute_{self.digits},code=sm_{self.digits}"
        portable = f"-gencode=arch=compute_{self.digits},code=compute_{self.digits}"
        return [native, portable] if self.ptx else [native]
