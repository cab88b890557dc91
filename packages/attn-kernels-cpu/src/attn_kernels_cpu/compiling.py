"""Compiling the kernels, once for each source, compiler and processor."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attn_core.errors import Unavailable
from filelock import FileLock

from attn_kernels_cpu import chip

SOURCES = Path(__file__).parent / "native"
OPTIONS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-w",
)
LONGEST = 300.0
"""Seconds a compiler may take."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where compiled kernels are kept: below `XDG_CACHE_HOME`, or `~/.cache`."""
    chosen = environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "attn" / "kernels-cpu"


def compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """The C++ compiler: what `CXX` says, or the first of g++, clang++ and c++ that is found."""
    candidates = (environ["CXX"],) if environ.get("CXX") else ("g++", "clang++", "c++")
    return next((found for found in map(shutil.which, candidates) if found), None)


def why_not(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why the kernels cannot be compiled and run here, or None if nothing speaks against it."""
    if reason := chip.lacking(chip.flags()):
        return reason
    if compiler(environ) is None:
        return "no C++ compiler is found (g++, clang++, or what CXX names); install one, such as Debian's package g++"
    return None


def compiled(folder: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The shared library of the kernels; compiled now, in some ten seconds, unless that was done before.

    Raises `Unavailable` where it cannot be compiled, with what the compiler said.
    """
    program = compiler(environ)
    if program is None:
        raise Unavailable(f"kernels cannot be compiled: {why_not(environ)}")
    folder = folder or cache_folder(environ)
    library = folder / f"{_fingerprint(program)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not library.exists():
                _compile(program, library)
    except OSError as error:
        raise Unavailable(f"kernels cannot be kept in {folder}: {error}") from error
    return library


@cache
def _fingerprint(program: str) -> str:
    """A name for what this compiler would make of the sources on this processor."""
    version = subprocess.run([program, "--version"], stdout=subprocess.PIPE, check=False).stdout
    said = hashlib.sha256(version + " ".join(OPTIONS + tuple(sorted(chip.flags()))).encode())
    for source in sorted(SOURCES.iterdir()):
        said.update(source.name.encode() + source.read_bytes())
    return said.hexdigest()[:32]


def _compile(program: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        made = Path(work) / "kernels.so"
        command = [program, *OPTIONS, str(SOURCES / "kernels.cpp"), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{program} took longer than {LONGEST:.0f} s to compile kernels") from error
        if done.returncode:
            raise Unavailable(f"{program} cannot compile kernels: {done.stderr.strip()[:2000]}")
        made.replace(library)
