"""What a version of the package promises, taken from a loaded build.

A surface is a plain dictionary, so that gate records (JSON) and releases/ (TOML) hold it as it is:

    all         the names of `__all__`
    functions   name: its parameters
    layers      name: parameters of forward, and what the layer declares
    private     name: parameters, of the private functions that other libraries call
    ops         name: schema
    dtypes      "<group> <device>": the dtypes that a call accepts; "cache" is a key-value cache's
    head-dims   "attention <device>": the head dims that a call accepts, such as "1-512"

The last two are found by calling, on one device. Only devices that both sides of a comparison were
taken on are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import groupby
from types import ModuleType

Surface = dict[str, dict[str, str] | list[str]]

_NAMED = {  # keys of a surface that hold named entries, and how a change of one is told
    "functions": "function",
    "layers": "layer",
    "private": "private function",
    "ops": "op",
}
_MEASURED = {"dtypes": "dtypes of", "head-dims": "head dims of"}
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_MAX_HEAD_DIM = 1024  # probed up to here
_REFUSALS = (ValueError, TypeError, NotImplementedError)


def surface_of(module: ModuleType, device: str) -> Surface:
    """The surface of a loaded variant. `device` is where dtypes and head dims are tried."""
    names = list(module.__all__)
    functions = {
        name: _parameters(getattr(module, name))
        for name in names
        if inspect.isfunction(getattr(module, name))
    }
    private = {
        name: _parameters(value)
        for name, value in sorted(vars(module).items())
        if name.startswith("_") and not name.startswith("__") and inspect.isfunction(value)
    }
    return {
        "all": sorted(names),
        "functions": functions,
        "layers": _layers(module.layers) if "layers" in names else {},
        "private": private,
        "ops": op_schemas(module.__name__),
        "dtypes": _accepted_dtypes(module, device),
        "head-dims": _accepted_head_dims(module, device),
    }


def _parameters(function: Callable) -> str:
    """Names, order and defaults. Without annotations, which every Python writes differently."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _layers(module: ModuleType) -> dict[str, str]:
    import torch

    layers = {}
    for name, value in sorted(vars(module).items()):
        is_layer = inspect.isclass(value) and issubclass(value, torch.nn.Module)
        if is_layer and value.__module__ == module.__name__:
            flags = [
                f"{flag}={getattr(value, flag, default)}"
                for flag, default in (("can_torch_compile", False), ("has_backward", True))
            ]
            layers[name] = f"forward{_parameters(value.forward)} {' '.join(flags)}"
    return layers


def op_schemas(namespace: str) -> dict[str, str]:
    """The schemas of every op that a build has registered, without its namespace."""
    import torch

    schemas = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        if qualified.startswith(f"{namespace}::"):
            name, _, overload = qualified.removeprefix(f"{namespace}::").partition(".")
            packet = getattr(getattr(torch.ops, namespace), name)
            schema = str(getattr(packet, overload or "default")._schema)
            schemas[name] = schema.removeprefix(f"{namespace}::").removeprefix(name)
    return dict(sorted(schemas.items()))


def sample_calls(module: ModuleType, device: str) -> dict[str, Callable]:
    """Small calls of the public functions, by group: each takes a dtype and a head dim."""
    import torch

    def attention(dtype, head_dim=16):
        q = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=device)
        return module.flash_attn_func(q, q, q)

    def kvcache(dtype, head_dim=16):
        q = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=device)
        return module.flash_attn_with_kvcache(q, q, q)

    def cache(dtype, head_dim=16):  # beside a q of another dtype
        q = torch.zeros(1, 1, 1, head_dim, dtype=torch.bfloat16, device=device)
        return module.flash_attn_with_kvcache(q, q.to(dtype), q.to(dtype))

    def norms(dtype, head_dim=16):
        x = torch.zeros(1, head_dim, dtype=dtype, device=device)
        return module.rms_norm(x, x[0])

    calls = {"attention": attention, "kvcache": kvcache, "cache": cache, "norms": norms}
    needs = {
        "attention": ("flash_attn_func", "q"),
        "kvcache": ("flash_attn_with_kvcache", "k_cache"),
        "cache": ("flash_attn_with_kvcache", "k_descale"),
        "norms": ("rms_norm", "x"),
    }
    return {
        group: call
        for group, call in calls.items()
        if needs[group][0] in module.__all__
        and needs[group][1] in inspect.signature(getattr(module, needs[group][0])).parameters
    }


def _accepted_dtypes(module: ModuleType, device: str) -> dict[str, str]:
    import torch

    return {
        f"{group} {device}": " ".join(
            name for name in _DTYPES if _accepts(call, getattr(torch, name))
        )
        for group, call in sample_calls(module, device).items()
    }


def _accepts(call: Callable, *arguments) -> bool:
    import torch

    try:
        call(*arguments)
    except _REFUSALS:
        return False
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return True


def _accepted_head_dims(module: ModuleType, device: str) -> dict[str, str]:
    import torch

    call = sample_calls(module, device).get("attention")
    if call is None:
        return {}
    sizes = range(1, _MAX_HEAD_DIM + 1)
    accepted = [size for size in sizes if _accepts(call, torch.bfloat16, size)]
    return {f"attention {device}": _as_ranges(accepted)}


def _as_ranges(numbers: Iterable[int]) -> str:
    """[1, 2, 3, 7] -> "1-3 7"."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return " ".join(runs)


def compare(old: Surface, new: Surface) -> list[str]:
    """What differs between two surfaces, a line each; empty when nothing does."""
    changes = [f"removed: {name}" for name in sorted(set(old["all"]) - set(new["all"]))]
    changes += [f"added: {name}" for name in sorted(set(new["all"]) - set(old["all"]))]
    told = {line.split(": ")[1] for line in changes}
    for key, what in _NAMED.items():
        before, after = old.get(key, {}), new.get(key, {})
        for name in sorted({*before, *after} - told):
            if name not in after:
                changes.append(f"removed: {what} {name}")
            elif name not in before:
                changes.append(f"added: {what} {name}")
            elif before[name] != after[name]:
                changes.append(f"changed: {what} {name}{before[name]} -> {after[name]}")
    for key, what in _MEASURED.items():
        before, after = old.get(key, {}), new.get(key, {})
        for name in sorted({*before, *after}):
            if _measured_on_both(name, old, new) and before.get(name) != after.get(name):
                changes.append(
                    f"changed: {what} {name}: {before.get(name, 'none')} -> "
                    f"{after.get(name, 'none')}"
                )
    return changes


def devices_of(surface: Surface) -> set[str]:
    return {name.split()[-1] for name in surface.get("dtypes", {})}


def _measured_on_both(name: str, old: Surface, new: Surface) -> bool:
    device = name.split()[-1]
    return device in devices_of(old) and device in devices_of(new)


def merge(surfaces: list[Surface]) -> Surface:
    """One surface of those of all variants, which agree but for the devices tried."""
    merged = dict(surfaces[0])
    for key in _MEASURED:
        merged[key] = {
            name: value
            for surface in surfaces
            for name, value in sorted(surface.get(key, {}).items())
        }
    return merged
