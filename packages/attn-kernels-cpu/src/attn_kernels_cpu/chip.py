"""The features of the processor, and the choice of the kernels' instruction set."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attn_core.errors import InvalidValue

VARIABLE = "ATTN_CPU_ISA"
"""The environment variable that selects an instruction set; the default is the fastest that the processor supports."""
X86 = "x86_64"
ARM = "aarch64"
MACHINES = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}
"""The supported processor architectures, by the names that operating systems use."""


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set that kernels are compiled for.

    `needs` are the required CPU features by their names in Linux, `options` the flags of g++ and clang++.
    """

    name: str
    machine: str
    needs: tuple[str, ...]
    options: tuple[str, ...]

    def lacking(self, present: frozenset[str]) -> str | None:
        """Why a processor with these features cannot run it, or None if it can."""
        return without(self.needs, present)


_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", *_AVX2)
TILES = ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16")
"""The CPU features for matrix products in tile registers (AMX)."""
_DOT = ("asimddp", "asimd", "fphp")
_SPELLED = {"bmi1": "bmi", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "avx_vnni": "avxvnni"}
"""The compiler's names of CPU features where they differ from those in Linux."""


def _x86(name: str, *needs: str) -> InstructionSet:
    options = tuple(f"-m{_SPELLED.get(need, need).replace('_', '-')}" for need in needs)
    return InstructionSet(name, X86, needs, options)


INSTRUCTION_SETS = {
    found.name: found
    for found in (
        _x86("amx", *TILES, *_AVX512),
        _x86("avx512", *_AVX512),
        _x86("avxvnni", "avx_vnni", *_AVX2),
        _x86("avx2", *_AVX2),
        InstructionSet("neon", ARM, _DOT, ("-march=armv8.2-a+dotprod+fp16",)),
    )
}
"""The instruction sets by name, the fastest first."""


@cache
def flags(info: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU features by their names in Linux; empty if they cannot be read."""
    try:
        lines = info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


AMD = "AuthenticAMD"


@cache
def vendor(info: Path = Path("/proc/cpuinfo")) -> str:
    """The vendor ID of the processor; "" if there is none, as on ARM."""
    try:
        lines = info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def supported(present: frozenset[str], machine: str = platform.machine()) -> list[InstructionSet]:
    """The instruction sets that a processor with these features can run, the fastest first."""
    here = MACHINES.get(machine)
    return [found for found in INSTRUCTION_SETS.values() if found.machine == here and not found.lacking(present)]


def lacking(present: frozenset[str], machine: str = platform.machine()) -> str | None:
    """Why no kernels can run on a processor with these features, or None if some can."""
    if supported(present, machine):
        return None
    here = [found for found in INSTRUCTION_SETS.values() if found.machine == MACHINES.get(machine)]
    if not here:
        return f"the kernels support {X86} and {ARM}, not {machine}"
    return here[-1].lacking(present)


def requested(environ: Mapping[str, str] = os.environ) -> InstructionSet | None:
    """The instruction set that `ATTN_CPU_ISA` names, or None if it is unset or empty.

    Raises `InvalidValue` for a name that is unknown or an instruction set that this processor cannot run.
    """
    name = environ.get(VARIABLE)
    if not name:
        return None
    able = {found.name: found for found in supported(flags())}
    if name in able:
        return able[name]
    reason = INSTRUCTION_SETS[name].lacking(flags()) if name in INSTRUCTION_SETS else None
    raise InvalidValue.of(
        VARIABLE, name, (", ".join(able) or "none on this processor") + (f" ({reason})" if reason else "")
    )


def candidates(environ: Mapping[str, str] = os.environ) -> list[InstructionSet]:
    """The instruction sets to try in order: the one that `ATTN_CPU_ISA` names, or all that the processor can run."""
    one = requested(environ)
    return supported(flags()) if one is None else [one]


def statement() -> str:
    """One line with the instruction set of the kernels on this processor and all that exist; compiles nothing."""
    try:
        able = candidates()
    except InvalidValue as error:
        return f"cpu kernels: none ({error.message})"
    taken = able[0].name if able else f"none: {lacking(flags())}"
    return f"cpu kernels: {taken} (of {', '.join(INSTRUCTION_SETS)})"


def without(needed: Sequence[str], present: frozenset[str]) -> str | None:
    """A sentence that names the needed features that the processor lacks; None if it has all of them."""
    missing = [name for name in needed if name not in present]
    return f"the processor has no {', '.join(missing)}" if missing else None
