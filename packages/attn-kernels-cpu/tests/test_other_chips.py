"""Kernels for ARM, compiled by a cross compiler and run by an emulator, give the bits of x86."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from attn_kernels_cpu import chip, compiling

DRIVER = Path(__file__).parent / "native" / "driver.cpp"
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def bits(compiler, isa, folder, *emulator):
    """What the driver computes with an instruction set."""
    made = folder / isa.name
    options = [option for option in compiling.OPTIONS if option not in ("-shared", "-fPIC", "-O3")]
    # Its own code is compiled once and run for a moment.
    command = [compiler, "-O1", *options, *isa.options, "-static", "-I", compiling.SOURCES, DRIVER, "-o", made]
    subprocess.run(command, check=True)
    found = subprocess.run([*emulator, made], stdout=subprocess.PIPE, check=True).stdout
    assert len(found) > 20_000
    return found


@pytest.mark.skipif(chip.MACHINES.get(chip.platform.machine()) != chip.X86, reason="compares ARM with x86")
def test_kernels_for_arm_give_the_bits_of_x86(tmp_path):
    here = chip.supported(chip.flags())
    missing = [program for program in (CROSS, EMULATOR, "g++") if shutil.which(program) is None]
    if missing or not here:
        pytest.skip(f"needs {', '.join(missing) or 'AVX2'} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    arm = bits(CROSS, chip.INSTRUCTION_SETS["neon"], tmp_path, EMULATOR)
    assert arm == bits("g++", here[-1], tmp_path)
