"""Checks that the Hopper kernels consist of the instructions that they are written for: ptxas would
compile a wgmma whose operands it cannot place into something that runs, at a fraction of the speed.

Machine code is read straight from the cubins: cuobjdump alone has no disassembler.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from .ninja_file import BuildPlan
from .symbols import demangle

# What every kernel of these sources must hold. Decoding's have no wgmma for few
# packed rows, but in latent attention.
HOPPER_SOURCES = {
    "csrc/attention/sm90/*_hdim*.cu": ("HGMMA", "UTMALDG"),
    "csrc/attention/decode/sm90a/latent.cu": ("HGMMA", "UTMALDG"),
    "csrc/attention/decode/sm90a/tall_*.cu": ("HGMMA", "UTMALDG"),
    "csrc/attention/decode/sm90a/bulk_*.cu": ("UTMALDG",),
}
# The opcode is in the low 12 bits of a 16-byte instruction, seen in cuobjdump's own dumps of sm_90a
# code.
OPCODES = {
    "HGMMA": {0x9F0, 0xDF0},  # wgmma.mma_async, A in shared memory or in registers
    "UTMALDG": {0x5B4},  # cp.async.bulk.tensor, global to shared
}

# Forward kernels work in steps (docs/attention_sm90.md): S = Q K^T of one block is issued (s), then
# O += P V of the block before (r: contracted over the rows of V, which the instruction calls B
# transposed, bit 62); the wait that leaves one group in flight (1) is for S, the next, which leaves
# none (0), for O. With a wait between the products, such as ptxas puts in where it cannot follow
# their registers, a softmax would have nothing to run beside.
STEP_SOURCE = "csrc/attention/sm90/fwd_hdim*.cu"
STEP = re.compile("s+r+10")
WARPGROUP = 0x9C5  # ARRIVE, and with bit 47 DEPBAR: groups that may stay in flight in bits 72 to 77


def check_sass(plan: BuildPlan, cuobjdump: Path) -> list[str]:
    """What is wrong with the machine code; empty when nothing is."""
    problems = []
    for step in plan.steps:
        required = required_instructions(step.source) if step.is_cuda else ()
        if not required:
            continue
        for kernel, counts in count_instructions(step.object, cuobjdump).items():
            missing = [name for name in required if counts[name] == 0]
            if missing:
                problems.append(f"{kernel} has no {' and no '.join(missing)}")
        if Path(step.source).match(STEP_SOURCE):
            problems += [
                f"{kernel} has no step with both products in flight"
                for kernel, products in product_sequences(step.object, cuobjdump).items()
                if products and not STEP.search(products)
            ]
    return problems


def required_instructions(source: Path | str) -> tuple[str, ...]:
    """What every kernel of this source must hold; nothing for most sources."""
    for pattern, names in HOPPER_SOURCES.items():
        if Path(source).match(pattern):
            return names
    return ()


def count_instructions(path: Path, cuobjdump: Path) -> dict[str, Counter]:
    """How often each instruction of OPCODES stands in each kernel of an object."""
    return {
        kernel: Counter(
            instruction
            for (word, _) in struct.iter_unpack("<QQ", code)
            for instruction, opcodes in OPCODES.items()
            if word & 0xFFF in opcodes
        )
        for kernel, code in _machine_code(path, cuobjdump).items()
    }


def product_sequences(path: Path, cuobjdump: Path) -> dict[str, str]:
    """The products of each kernel and the waits for them, in their order: see STEP."""
    return {
        kernel: "".join(_product_or_wait(*words) for words in struct.iter_unpack("<QQ", code))
        for kernel, code in _machine_code(path, cuobjdump).items()
    }


def _product_or_wait(low: int, high: int) -> str:
    opcode = low & 0xFFF
    if opcode == WARPGROUP and low >> 47 & 1:
        return str(high >> 8 & 0x3F)
    if opcode in OPCODES["HGMMA"]:
        return "r" if low >> 62 & 1 else "s"
    return ""


def _machine_code(path: Path, cuobjdump: Path) -> dict[str, bytes]:
    """{kernel: its code} of an object."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(cuobjdump), "-xelf", "all", str(path.resolve())]
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        found = {}
        for cubin in sorted(Path(folder).glob("*.cubin")):
            found.update(_kernels(cubin.read_bytes()))
    names = demangle(list(found), parameters=False)
    return dict(zip(names, found.values(), strict=True))


def _kernels(data: bytes) -> list[tuple[str, bytes]]:
    """(mangled name, machine code) of the sections .text.<name> of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)  # e_shoff
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
    names_offset = headers[names_index][4]
    kernels = []
    for name_at, _, _, _, offset, size in headers:
        start = names_offset + name_at
        name = data[start : data.index(b"\0", start)].decode()
        if name.startswith(".text."):
            kernels.append((name[len(".text.") :], data[offset : offset + size]))
    return kernels
