"""Compile the kernels of a wheel: `python -m attn_kernels_cpu.prebuild x86_64 FOLDER`.

The compiler is the one that `CXX` names. For a processor architecture other than this machine's,
set it to a cross compiler, such as aarch64-linux-gnu-g++.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from attn_core.errors import Unavailable, starting

from attn_kernels_cpu import chip
from attn_kernels_cpu.compiling import command, compiler, source_hash


def prebuild(machine: str, folder: Path) -> list[Path]:
    """Compile the libraries for every instruction set of an architecture into `folder`, and return their paths.

    They are named as `compiling.prebuilt` expects. Raises `Unavailable` if there is no compiler that starts, and
    `CalledProcessError` if it fails.
    """
    program = compiler()
    if program is None:
        raise Unavailable("no C++ compiler is found (g++, clang++, or what CXX names)")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for isa in chip.INSTRUCTION_SETS.values():
        if isa.machine == machine:
            out = folder / f"{isa.name}-{source_hash()}.so"
            with starting(program):
                subprocess.run([*command(program, isa, out), "-s"], check=True)
            made.append(out)
    return made


def main() -> None:
    """The command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine", choices=sorted({isa.machine for isa in chip.INSTRUCTION_SETS.values()}))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    prebuild(given.machine, given.folder)


if __name__ == "__main__":
    main()
