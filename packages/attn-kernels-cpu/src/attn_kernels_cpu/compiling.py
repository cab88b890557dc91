"""The kernels' shared libraries: prebuilt in a wheel, or compiled once per source, compiler and instruction set."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attn_core.errors import Unavailable, starting
from filelock import FileLock

from attn_kernels_cpu import chip

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).parent / "prebuilt"
"""The folder of prebuilt libraries in a wheel, each named after its instruction set and `source_hash()`."""
OPTIONS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-w",
)
LONGEST = 300.0
"""The timeout of the compiler in seconds."""

log = logging.getLogger(__name__)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for compiled kernels, below `XDG_CACHE_HOME` or `~/.cache`."""
    chosen = environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "attn" / "kernels-cpu"


def compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """The C++ compiler: the one that `CXX` names, or the first of g++, clang++ and c++ that is found; else None."""
    candidates = (environ["CXX"],) if environ.get("CXX") else ("g++", "clang++", "c++")
    return _first_of(candidates, os.environ.get("PATH"))


@cache
def _first_of(candidates: tuple[str, ...], path: str | None) -> str | None:
    """The first program found, looked for once: each layer of a model asks whether kernels can be compiled."""
    return next((found for name in candidates if (found := shutil.which(name, path=path))), None)


def why_not(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why kernels cannot run on this machine, or None if they are expected to."""
    if reason := chip.lacking(chip.flags()):
        return reason
    if any(prebuilt(isa) for isa in chip.candidates(environ)) or compiler(environ) is not None:
        return None
    return "no C++ compiler is found (g++, clang++, or what CXX names); install one, such as Debian's package g++"


def prebuilt(isa: chip.InstructionSet) -> Path | None:
    """The library of the wheel that was built from exactly these sources; None if there is none."""
    found = PREBUILT / f"{isa.name}-{source_hash()}.so"
    return found if found.exists() else None


@cache
def source_hash() -> str:
    """A hash of the sources and the compiler options."""
    digest = hashlib.sha256(" ".join(OPTIONS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def command(program: str, isa: chip.InstructionSet, out: Path) -> list[str]:
    """The command that compiles the kernels for an instruction set."""
    return [program, *OPTIONS, *isa.options, str(SOURCES / "kernels.cpp"), "-o", str(out)]


def compiled(isa: chip.InstructionSet, folder: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The shared library for an instruction set; compiled, in about five seconds, unless it is cached.

    It is stored in `folder`, by default the cache folder, or in a temporary folder of this process if that cannot be
    written to. Raises `Unavailable` with the compiler's message if it cannot be compiled.
    """
    program = compiler(environ)
    if program is None:
        raise Unavailable(f"kernels cannot be compiled: {why_not(environ)}")
    folder = folder or cache_folder(environ)
    name = f"{isa.name}-{_fingerprint(program)}.so"
    try:
        return _kept(program, isa, folder / name)
    except OSError as error:
        own = _temporary()
        log.warning(
            "kernels are compiled for this process only, because they cannot be cached in %s: %s", folder, error
        )
        return _kept(program, isa, own / name)


def _kept(program: str, isa: chip.InstructionSet, library: Path) -> Path:
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.parent / "lock"):
        if not library.exists():
            _compile(program, isa, library)
    return library


@cache
def _temporary() -> Path:
    """A folder that only this user can read, removed when the process exits."""
    folder = Path(tempfile.mkdtemp(prefix="attn-kernels-cpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _fingerprint(program: str) -> str:
    """A hash of the compiler's version and the sources, which names the compiled library."""
    with starting(program):
        version = subprocess.run([program, "--version"], stdout=subprocess.PIPE, check=False).stdout
    return hashlib.sha256(version + source_hash().encode()).hexdigest()[:32]


def _compile(program: str, isa: chip.InstructionSet, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        made = Path(work) / "kernels.so"
        try:
            with starting(program):
                done = subprocess.run(
                    command(program, isa, made), capture_output=True, text=True, timeout=LONGEST, check=False
                )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{program} took longer than {LONGEST:.0f} s to compile kernels") from error
        if done.returncode:
            raise Unavailable(f"{program} cannot compile kernels for {isa.name}: {done.stderr.strip()[:2000]}")
        made.replace(library)
