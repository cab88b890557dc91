"""Kernels are compiled once; where they cannot be, the reason is told and nothing else breaks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from attn_core import installed
from attn_core.errors import KernelRefused, Unavailable
from attn_core.kernels.linear import LinearProblem, choose_linear
from attn_kernels_cpu import chip, compiling, library


def test_a_machine_without_a_compiler_is_told_so_and_served_by_torch(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(chip, "lacking", lambda _flags: None)
    assert "no C++ compiler is found" in (compiling.why_not() or "")
    problem = LinearProblem(weights="int8", inputs=64, outputs=64)
    assert choose_linear(installed().linears, problem).name == "torch_int8"
    with pytest.raises(KernelRefused, match=r"cpu_int8 \(no C\+\+ compiler is found"):
        choose_linear(installed().linears, problem, "cpu_int8")


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("chip_name", ["cascadelake", "sapphirerapids"])
def test_the_sources_are_valid_for_chips_with_tile_registers_and_without(chip_name):
    """Whichever of the two this machine has."""
    options = [option for option in compiling.OPTIONS if not option.startswith("-march")]
    command = [
        compiling.compiler(),
        *options,
        f"-march={chip_name}",
        "-fsyntax-only",
        compiling.SOURCES / "kernels.cpp",
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_is_quoted_and_torch_serves(monkeypatch, tmp_path):
    def fails():
        raise Unavailable("g++ cannot compile kernels: no space left")

    monkeypatch.setattr(chip, "lacking", lambda _flags: None)
    monkeypatch.setattr(library, "library", fails)
    library.trouble.cache_clear()
    try:
        problem = LinearProblem(weights="int8", inputs=64, outputs=64)
        assert choose_linear(installed().linears, problem).name == "torch_int8"
        with pytest.raises(KernelRefused, match="no space left"):
            choose_linear(installed().linears, problem, "cpu_int8")
    finally:
        library.trouble.cache_clear()


def test_a_chip_that_lacks_an_instruction_set_is_told_which():
    assert chip.lacking(frozenset(chip.NEEDED), "x86_64") is None
    assert chip.lacking(frozenset(chip.NEEDED) - {"avx512_vnni"}, "x86_64") == "the processor has no avx512_vnni"
    assert "aarch64" in (chip.lacking(frozenset(), "aarch64") or "")


def test_what_linux_says_of_its_processor_is_read(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert chip.flags(info) == {"fpu", "avx512f"}
    assert chip.flags(tmp_path / "none") == frozenset()


def script(tmp_path, text):
    path = tmp_path / "cxx"
    path.write_text(f"#!{sys.executable}\nimport sys\n{text}\n")
    path.chmod(0o755)
    return {**os.environ, "CXX": str(path)}


COUNTING = """
if "--version" in sys.argv:
    print("a compiler that counts")
else:
    out = sys.argv[sys.argv.index("-o") + 1]
    open(out, "w").write("compiled")
    open(__file__ + ".calls", "a").write("x")
"""


def test_the_same_kernels_are_compiled_once(tmp_path):
    environ = script(tmp_path, COUNTING)
    first = compiling.compiled(tmp_path / "cache", environ)
    assert compiling.compiled(tmp_path / "cache", environ) == first
    assert (tmp_path / "cxx.calls").read_text() == "x"
    assert [path.name for path in (tmp_path / "cache").glob("*.so")] == [first.name]


def test_what_the_compiler_says_is_told(tmp_path):
    environ = script(tmp_path, "sys.exit('no such header: immintrin.h') if '--version' not in sys.argv else print(1)")
    with pytest.raises(Unavailable, match="cannot compile kernels: no such header"):
        compiling.compiled(tmp_path / "cache", environ)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="cannot be kept in"):
        compiling.compiled(tmp_path / "file" / "cache", script(tmp_path, COUNTING))


def test_listing_the_kernels_imports_no_torch():
    program = (
        "import sys; from attn_kernels_cpu import plugin; plugin.attn_linears();"
        "assert 'torch' not in sys.modules; print('light')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "light", done.stderr
