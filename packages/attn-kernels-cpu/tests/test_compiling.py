"""Kernels are compiled once; where they cannot be, the reason is told and nothing else breaks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue, KernelRefused, Unavailable
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


@pytest.mark.usefixtures("_best_kernels")
@pytest.mark.parametrize("name", [name for name, isa in chip.INSTRUCTION_SETS.items() if isa.machine == chip.X86])
def test_the_sources_are_valid_for_every_instruction_set_of_x86(name):
    """Whichever of them this machine has."""
    isa = chip.INSTRUCTION_SETS[name]
    command = [compiling.compiler(), *compiling.OPTIONS, *isa.options, "-fsyntax-only"]
    done = subprocess.run([*command, compiling.SOURCES / "kernels.cpp"], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


TILES_OF_BYTES = """
#include "linear.hpp"
constexpr int ROWS = Shape::INT_ROWS;
void bytes(const Linear& l, const QuantisedRows& x, Into to) { int8_tile<ROWS, 1>(l, x, 0, 0, to); }
void nibbles(const Linear& l, const QuantisedRows& x, Into to) { nibble_tile<OfQ4_1, ROWS, 1>(l, x, 0, 0, to); }
"""


@pytest.mark.usefixtures("_best_kernels")
@pytest.mark.parametrize("name", [name for name, isa in chip.INSTRUCTION_SETS.items() if isa.machine == chip.X86])
def test_products_of_bytes_are_added_up_in_registers(name, tmp_path):
    """With AVX2 g++ 12 put off 56 additions of a group, and kept all products in memory until then: 173 stores."""
    source = tmp_path / "tiles.cpp"
    source.write_text(TILES_OF_BYTES)
    options = [option for option in compiling.OPTIONS if option != "-shared"] + [f"-I{compiling.SOURCES}"]
    command = [compiling.compiler(), *options, *chip.INSTRUCTION_SETS[name].options, "-S", "-o", "-", source]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    stores = re.findall(r"vmov\w+\s+%[xyz]mm\d+, -?\w*\(%r[sb]p\)", done.stdout)
    assert len(stores) < 80


def test_a_compiler_that_fails_is_quoted_and_torch_serves(monkeypatch, tmp_path):
    def fails():
        raise Unavailable("g++ cannot compile kernels: no space left")

    monkeypatch.setattr(chip, "lacking", lambda _flags: None)
    monkeypatch.setattr(library, "library", fails)
    monkeypatch.setattr(compiling, "why_not", lambda: None)
    library.trouble.cache_clear()
    try:
        problem = LinearProblem(weights="int8", inputs=64, outputs=64)
        assert choose_linear(installed().linears, problem).name == "torch_int8"
        with pytest.raises(KernelRefused, match="no space left"):
            choose_linear(installed().linears, problem, "cpu_int8")
    finally:
        library.trouble.cache_clear()


def test_a_process_whose_compiler_fails_serves_all_the_same_and_says_why(tmp_path):
    program = (
        "import torch; from attn_kernels_cpu import chip, compiling;"
        "compiling.prebuilt = lambda isa: None;"
        "from attn_schema.decoder import DecoderConfig; from attn_models.decoder.decoder import Decoder;"
        "from attn_models.quantization.quantize import quantize_model;"
        "model = Decoder(DecoderConfig(vocab_size=32, max_seq_len=16, hidden_size=32, num_layers=1, num_heads=2));"
        "quantize_model(model, 'int8'); print(type(model.head).__name__);"
        "from attn_kernels_cpu import library; print(library.trouble())"
    )
    environ = script(tmp_path, "sys.exit('no space left') if '--version' not in sys.argv else print(1)")
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    layer, trouble = done.stdout.splitlines()[:2]
    assert layer != "PackedLinear"
    assert "no space left" in trouble or "the processor has no" in trouble


NEEDED = {name: frozenset(isa.needs) for name, isa in chip.INSTRUCTION_SETS.items()}


def test_a_chip_gets_the_fastest_instruction_set_that_it_has():
    def first(flags, machine="x86_64"):
        return next((isa.name for isa in chip.supported(flags, machine)), None)

    assert [first(NEEDED[name]) for name in ("amx", "avx512", "avxvnni", "avx2")] == [
        "amx",
        "avx512",
        "avxvnni",
        "avx2",
    ]
    assert first(NEEDED["avx512"] - {"avx512_vnni"}) == "avx2"
    assert first(NEEDED["neon"], "arm64") == "neon"
    assert first(NEEDED["avx2"], "aarch64") is None


def test_a_chip_that_lacks_an_instruction_set_is_told_which():
    assert chip.lacking(NEEDED["avx2"], "x86_64") is None
    assert chip.lacking(NEEDED["avx2"] - {"fma"}, "x86_64") == "the processor has no fma"
    assert "riscv64" in (chip.lacking(frozenset(), "riscv64") or "")


@pytest.mark.usefixtures("_best_kernels")
def test_an_instruction_set_that_is_asked_for_is_taken_or_refused_by_name(monkeypatch):
    able = [isa.name for isa in chip.supported(chip.flags())]
    monkeypatch.setenv(chip.VARIABLE, able[-1])
    assert [isa.name for isa in chip.candidates()] == [able[-1]]
    monkeypatch.setenv(chip.VARIABLE, "")
    assert [isa.name for isa in chip.candidates()] == able
    monkeypatch.setenv(chip.VARIABLE, "avx3")
    with pytest.raises(InvalidValue, match=rf"ATTN_CPU_ISA: 'avx3' is not allowed; allowed: {', '.join(able)}"):
        chip.candidates()


def test_an_instruction_set_that_the_chip_lacks_is_refused_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(chip, "flags", lambda: NEEDED["avx2"])
    monkeypatch.setenv(chip.VARIABLE, "avx512")
    with pytest.raises(InvalidValue, match="the processor has no avx512f"):
        chip.candidates()


def test_what_linux_says_of_its_processor_is_read(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert chip.flags(info) == {"fpu", "avx512f"}
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    assert chip.flags(tmp_path / "arm") == {"fp", "asimd", "asimddp"}
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


AVX2 = chip.INSTRUCTION_SETS["avx2"]


def test_the_same_kernels_are_compiled_once(tmp_path):
    environ = script(tmp_path, COUNTING)
    first = compiling.compiled(AVX2, tmp_path / "cache", environ)
    assert compiling.compiled(AVX2, tmp_path / "cache", environ) == first
    assert (tmp_path / "cxx.calls").read_text() == "x"
    other = compiling.compiled(chip.INSTRUCTION_SETS["avx512"], tmp_path / "cache", environ)
    assert {path.name for path in (tmp_path / "cache").glob("*.so")} == {first.name, other.name}


def test_processes_that_start_together_compile_once(tmp_path):
    environ = script(tmp_path, COUNTING + "    import time; time.sleep(0.5)")
    program = (
        "import sys, pathlib; from attn_kernels_cpu import chip, compiling;"
        "print(compiling.compiled(chip.INSTRUCTION_SETS['avx2'], pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(3)]
    paths = {process.communicate()[0].strip() for process in running}
    assert len(paths) == 1
    assert Path(paths.pop()).read_text() == "compiled"
    assert (tmp_path / "cxx.calls").read_text() == "x"


def test_what_the_compiler_says_is_told(tmp_path):
    environ = script(tmp_path, "sys.exit('no such header: immintrin.h') if '--version' not in sys.argv else print(1)")
    with pytest.raises(Unavailable, match="cannot compile kernels for avx2: no such header"):
        compiling.compiled(AVX2, tmp_path / "cache", environ)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_where_the_cache_cannot_be_written_kernels_are_compiled_for_the_process_alone(tmp_path, caplog):
    (tmp_path / "file").touch()
    found = compiling.compiled(AVX2, tmp_path / "file" / "cache", script(tmp_path, COUNTING))
    assert found.read_text() == "compiled"
    assert found.parent.stat().st_mode & 0o77 == 0
    assert "cannot be cached in" in caplog.text


@pytest.mark.usefixtures("_best_kernels", "_fresh_library")
def test_the_next_instruction_set_is_taken_where_a_compiler_fails_on_the_best(monkeypatch):
    able = chip.supported(chip.flags())
    if len(able) == 1:
        pytest.skip("this chip has one instruction set only")

    def old(isa):
        if isa is able[0]:
            raise Unavailable("unknown option")
        return compiling.compiled(isa)

    monkeypatch.setattr(library, "prebuilt", lambda _isa: None)
    monkeypatch.setattr(library, "compiled", old)
    assert library.loaded().isa is able[1]


@pytest.mark.usefixtures("_best_kernels", "_fresh_library")
def test_a_library_of_a_wheel_needs_no_compiler_and_a_broken_one_is_compiled_instead(monkeypatch, tmp_path):
    isa = chip.supported(chip.flags())[-1]
    made = compiling.compiled(isa)
    monkeypatch.setenv(chip.VARIABLE, isa.name)
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path)
    brought = tmp_path / f"{isa.name}-{compiling.source_hash()}.so"
    brought.write_bytes(made.read_bytes())
    with monkeypatch.context() as without:
        without.setenv("CXX", "no-such-compiler")
        assert compiling.why_not() is None
        assert library.loaded().functions._name == str(brought)
    library.loaded.cache_clear()
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / brought.name).write_text("not a library")
    assert library.loaded().functions._name == str(made)


@pytest.mark.usefixtures("_best_kernels")
def test_fewer_threads_than_asked_for_give_the_same_bits():
    program = (
        "import torch; torch.manual_seed(0); torch.set_num_threads({threads});"
        "from attn_kernels_cpu.packed import PackedLinear;"
        "layer = PackedLinear('int8', torch.randn(200, 64), None); x = torch.randn(9, 64);"
        "print(layer(x).double().sum().item(), layer.largest(x).tolist())"
    )

    def said(threads, **environ):
        command = [sys.executable, "-c", program.format(threads=threads)]
        return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=True).stdout

    assert said(8, OMP_THREAD_LIMIT="1") == said(1)


def test_listing_the_kernels_imports_no_torch():
    program = (
        "import sys; from attn_kernels_cpu import plugin; plugin.attn_linears();"
        "assert 'torch' not in sys.modules; print('light')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "light", done.stderr


@pytest.mark.usefixtures("_best_kernels")
def test_bfloat16_is_left_to_onednn_nowhere_without_tile_registers(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    problem = LinearProblem(weights="bfloat16", inputs=64, outputs=64, dtype="bfloat16")
    assert choose_linear(installed().linears, problem).name != "onednn_bfloat16"
