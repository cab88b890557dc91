"""Compile the kernels of a wheel: `python -m attn_kernels_cpu.prebuild x86_64 FOLDER`.

The compiler is the one that `CXX` names: for another kind of processor than this machine's
a cross compiler, such as aarch64-linux-gnu-g++.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from attn_core.errors import Unavailable

from attn_kernels_cpu import chip
from attn_kernels_cpu.compiling import command, compiler, source_hash


def prebuild(machine: str, folder: Path) -> list[Path]:
    """The libraries for every instruction set of a kind of processor, in `folder`, named as `compiling.prebuilt` looks.

    Raises `Unavailable` where there is no compiler, and `CalledProcessError` where it fails.
    """
    program = compiler()
    if program is None:
        raise Unavailable("no C++ compiler is found (g++, clang++, or what CXX names)")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for isa in chip.INSTRUCTION_SETS.values():
        if isa.machine == machine:
            out = folder / f"{isa.name}-{source_hash()}.so"
            subprocess.run([*command(program, isa, out), "-s"], check=True)
            made.append(out)
    return made


def main() -> None:
    """Compile what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine", choices=sorted({isa.machine for isa in chip.INSTRUCTION_SETS.values()}))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    prebuild(given.machine, given.folder)


if __name__ == "__main__":
    main()
