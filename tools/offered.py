"""Which of the variants that can be built here the loader would give to the installed torch."""

from __future__ import annotations

from .build_toml import BuildToml
from .cuda_toolkit import buildable_versions
from .errors import BuildError
from .variant import variant_name


def offered_variant(config: BuildToml) -> tuple[str, str | None]:
    """The backend and CUDA version that `kernels` itself prefers on this torch.

    Raises:
        BuildError: it would accept none of them; with its reason for each.
    """
    from kernels.variants import parse_variant, resolve_variant, variants_trace_str

    candidates: dict[str, tuple[str, str | None]] = {}
    if "cpu" in config.general.backends:
        candidates[variant_name(config, "cpu", None)] = ("cpu", None)
    if "cuda" in config.general.backends:
        for version in buildable_versions():
            if in_cuda_range(config, version):
                candidates[variant_name(config, "cuda", version)] = ("cuda", version)
    best, trace = resolve_variant([parse_variant(name) for name in candidates])
    if best is None:
        raise BuildError(
            "--for-this-torch: the installed torch would be offered none of the variants that can "
            f"be built here:\n{variants_trace_str(trace)}"
        )
    return candidates[best.variant_str]


def in_cuda_range(config: BuildToml, version: str) -> bool:
    limits = config.general.cuda
    lowest = limits.minver is None or _parts(limits.minver) <= _parts(version)
    return lowest and (limits.maxver is None or _parts(version) <= _parts(limits.maxver))


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
