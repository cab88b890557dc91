from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, RaggedBatch, Window, installed
from attn_core.batch import RowsInPlace
from attn_core.errors import InvalidValue, KernelRefused
from attn_core.kernels import devices
from attn_core.kernels.attend import BAND, AttendProblem, PagedAttendProblem, PagedAttentionInputs
from attn_core.kernels.dispatch import choose
from attn_core.kernels.linear import explain_linear, linear_problem
from attn_core.kernels.recurrence import RecurrenceSpec, Steps, recurrence_problem
from attn_core.kernels.rowwise import ROW_FORMS, Targets, row_problem
from attn_core.masks import Band, Strided, band_of
from attn_kernels_triton import machine
from attn_kernels_triton.backends.attend import TritonAttend
from attn_kernels_triton.backends.conditions import InOrder
from attn_kernels_triton.backends.recurrence import OnRegisters, TritonChunked
from attn_kernels_triton.backends.rowwise import InOnePass


def test_the_kernel_is_listed_and_says_whether_it_can_run_here():
    kernel = installed().kernels.get("triton_attend")
    assert kernel.available() == machine.absence()


@pytest.mark.parametrize("missing", [True, False])
def test_a_machine_without_triton_or_gpu_is_told_what_is_missing(monkeypatch, missing):
    monkeypatch.setattr(machine, "has_triton", lambda: not missing)
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    said = TritonAttend().available()
    assert said is not None
    assert ("pip install triton" in said) == missing


OutOfResources = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})


@pytest.mark.parametrize(
    ("error", "meant"),
    [
        (OutOfResources("shared memory, Required: 300000"), True),
        (RuntimeError("PassManager::run failed"), True),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("PassManager::run failed"), False),
        (InvalidValue("PassManager::run failed"), False),
    ],
    ids=str,
)
def test_only_errors_that_mean_that_a_chip_cannot_run_a_program_are_taken_for_that(error, meant):
    assert (TritonAttend().unsupported(error) is not None) == meant


def test_listing_imports_neither_torch_nor_triton():
    code = "import sys; from attn_kernels_triton import plugin; [k.available() for k in plugin.attn_kernels()]"
    code += "; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert not {"torch", "triton"} & set(done.stdout.split())


GPU = {"key_size": 64, "value_size": 64, "dtype": "bfloat16", "device": "cuda"}


def problem(**fields):
    return AttendProblem(**GPU | fields)


def test_a_gpu_that_is_there_gets_this_kernel_and_a_cpu_does_not(monkeypatch):
    monkeypatch.setattr(TritonAttend, "available", lambda self: None)
    kernels = installed().kernels
    assert choose(kernels, problem(mask="window", gradients=True)).name == "triton_attend"
    assert choose(kernels, AttendProblem(mask="causal", dtype="bfloat16")).name != "triton_attend"
    with pytest.raises(KernelRefused, match="device"):
        choose(kernels, AttendProblem(mask="causal", dtype="bfloat16"), "triton_attend")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"modifiers": ("alibi", "soft_cap")}, "modifiers"),
        ({"modifiers": ("soft_cap", "soft_cap")}, "modifiers"),
        ({"modifiers": ("t5_bias", "soft_cap")}, "modifiers"),
        ({"modifiers": ("relative_keys",)}, "modifiers"),
        ({"modifiers": ("t5_bias",), "gradients": True, "has_positions": True}, "gradients"),
        ({"dropout": True, "value_size": 129}, "dropout"),
        ({"dropout": True, "modifiers": ("t5_bias",)}, "dropout"),
        ({"modifiers": ("relative_bias",), "key_size": 129}, "modifiers"),
        ({"modifiers": ("relative_bias",), "mask": "prefix"}, "mask"),
        ({"distribution": "sparsemax"}, "distribution"),
        ({"score": "additive"}, "score"),
        ({"weights": True}, "weights"),
        ({"irregular_groups": True}, "irregular_groups"),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(fields, named):
    reasons = TritonAttend().refusals(problem(**fields))
    assert [reason.partition(":")[0] for reason in reasons] == [named]


def test_what_skips_more_costs_less():
    dense = TritonAttend().cost(problem(mask="causal"))
    assert 0 < TritonAttend().cost(problem(mask="window", density=0.1)) < dense < 1


def recurrence(key_size=128, tokens=0, **kind):
    heads = Heads(query=4, key_value=4, key_size=key_size, value_size=128)
    known = {"dtype": "bfloat16", "device": "cuda", **{k: kind.pop(k) for k in ("dtype", "gradients") if k in kind}}
    return recurrence_problem(RecurrenceSpec(heads=heads, **kind), tokens=tokens, **known)


def test_recurrences_on_a_gpu_get_these_kernels_and_single_tokens_the_other_one(monkeypatch):
    monkeypatch.setattr(OnRegisters, "available", lambda self: None)
    kernels = installed().kernels
    assert choose(kernels, recurrence(decay="channel", delta_rule=True, gradients=True)).name == "triton_chunked"
    assert choose(kernels, recurrence(tokens=1)).name == "triton_recurrent"
    assert choose(kernels, recurrence(tokens=1, gradients=True)).name == "triton_chunked"
    assert choose(kernels, recurrence(512)).name == "plain_chunked"


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (recurrence(300), "key_size"),
        (recurrence(256, decay="channel"), "decay"),
        (recurrence(256, dtype="float32"), "dtype"),
        (recurrence(dtype="float16"), "dtype"),
    ],
)
def test_recurrences_that_do_not_fit_the_chip_are_refused_by_name(asked, named):
    assert [reason.partition(":")[0] for reason in TritonChunked().refusals(asked)] == [named]
    assert not TritonChunked().refusals(recurrence(256, decay="head"))


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("triton_paged", {}, []),
        ("triton_paged", {"modifiers": ("soft_cap", "relative_bias"), "rows": "int4", "key_size": 128}, []),
        ("triton_paged", {"key_size": 256}, ["modifiers"]),
        ("triton_paged", {"value_size": 160, "rows": "int8"}, ["modifiers"]),
        ("triton_latent", {"rows": "latent"}, ["modifiers"]),
    ],
)
def test_learned_biases_are_met_over_pages_where_registers_are_left_for_them(name, fields, named):
    given = {"mask": BAND, "modifiers": ("t5_bias",), "score": "dot", **fields}
    reasons = installed().kernels.get(name).refusals(PagedAttendProblem(**GPU | given))
    assert [reason.partition(":")[0] for reason in reasons] == named


ON_ROWS = {
    "rms_norm": "triton_rms_norm",
    "rotary": "triton_rotary",
    "gate": "triton_gate",
    "cross_entropy": "triton_cross_entropy",
}


def on_rows(operation, width=128, *, device="cuda", dtype="bfloat16"):
    return row_problem(operation, width, form=ROW_FORMS[operation][0], dtype=dtype, device=device, gradients=True)


@pytest.mark.parametrize("operation", ON_ROWS)
def test_operations_on_rows_get_these_kernels_on_a_gpu_alone(monkeypatch, operation):
    monkeypatch.setattr(InOnePass, "available", lambda self: None)
    kernels = installed().kernels
    assert choose(kernels, on_rows(operation)).name == ON_ROWS[operation]
    for changed, named in (({"device": "cpu"}, "device"), ({"dtype": "float64"}, "dtype")):
        reasons = kernels.get(ON_ROWS[operation]).refusals(on_rows(operation, **changed))
        assert [reason.partition(":")[0] for reason in reasons] == [named]


def test_rows_too_wide_for_registers_are_refused():
    refused = {name: installed().kernels.get(ON_ROWS[name]).refusals(on_rows(name, 10**6)) for name in ON_ROWS}
    assert [name for name, reasons in refused.items() if reasons] == ["rms_norm", "rotary"]


@pytest.mark.parametrize("operation", ON_ROWS)
def test_tensors_of_a_cpu_are_refused_before_anything_is_launched(operation):
    pytest.importorskip("triton")
    kernel, rows = installed().kernels.get(ON_ROWS[operation]), torch.zeros(2, 1, 8)
    calls = {
        "rms_norm": lambda: kernel.norm(rows, None, 1e-6),
        "rotary": lambda: kernel.rotate(rows, rows, rows, interleaved=False),
        "gate": lambda: kernel.gated(rows, rows, "silu"),
        "cross_entropy": lambda: kernel.losses(rows[:, 0], torch.zeros(2, dtype=int), Targets(), gradients=True),
    }
    with pytest.raises(InvalidValue, match="do not run on a CPU"):
        calls[operation]()


def test_attention_and_recurrences_of_a_cpu_are_refused_before_anything_is_launched():
    pytest.importorskip("triton")
    kernels, rows = installed().kernels, torch.zeros(1, 4, 2, 16)
    spec = AttentionSpec(heads=Heads(query=2, key_value=2, key_size=16, value_size=16))
    held = RowsInPlace({"key": rows[0], "value": rows[0]}, torch.zeros(1, 4).long(), torch.zeros(1, 4).long(), (0,))
    paged = PagedAttentionInputs(
        query=rows[0, :1], batch=RaggedBatch.of((1,), (3,), torch.tensor), rows=held, requests=(0,)
    )
    calls = {
        "triton_attend": lambda kernel: kernel.run(spec, AttentionInputs(query=rows, key=rows, value=rows)),
        "triton_paged": lambda kernel: kernel.run(spec, paged),
        "triton_chunked": lambda kernel: kernel.run(Steps(rows, rows, rows), None, 64),
        "triton_recurrent": lambda kernel: kernel.run(Steps(rows, rows, rows), None, 64),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidValue, match="do not run on a CPU"):
            call(kernels.get(name))


FP8 = ("fp8", "fp8_channel", "fp8_block")


def in_fp8(form, quantization="fp8", **fields):
    problem = linear_problem(form, (4096, 4096), quantization=quantization, dtype="bfloat16", device="cuda")
    return explain_linear(installed().linears, replace(problem, **fields))


def chip(monkeypatch, gpu):
    """A machine with this GPU of NVIDIA, with one of others for None."""
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "nvidia_gpu", lambda: gpu)


@pytest.mark.parametrize("form", FP8)
@pytest.mark.parametrize(
    ("gpu", "ways", "why"),
    [
        (devices.Gpu("NVIDIA H200", (9, 0)), ["w8a8", "w8a16"], None),
        (devices.Gpu("NVIDIA L4", (8, 9)), ["w8a8", "w8a16"], None),
        (
            devices.Gpu("NVIDIA A100", (8, 0)),
            ["w8a16"],
            "NVIDIA A100 cannot multiply FP8: its compute capability is 8.0, required is 8.9 or more",
        ),
        (None, ["w8a16"], "e4m3fnuz"),
    ],
    ids=["hopper", "ada", "ampere", "of AMD"],
)
def test_the_chip_decides_whether_rows_are_in_fp8_too_and_says_why_not(monkeypatch, form, gpu, ways, why):
    pytest.importorskip("triton")
    chip(monkeypatch, gpu)
    verdicts = in_fp8(form)
    assert [found.kernel.name for found in verdicts if found.accepted] == [f"triton_{form}_{way}" for way in ways]
    refused = [" ".join(found.reasons) for found in verdicts if not found.accepted]
    assert len(refused) == (why is not None)
    assert all(why in reasons for reasons in refused)


@pytest.mark.parametrize("form", FP8[1:])
@pytest.mark.parametrize("quantization", ["auto", "int8", "bfloat16"])
def test_rows_are_not_rounded_because_weights_are_stored_in_fp8(monkeypatch, form, quantization):
    pytest.importorskip("triton")
    chip(monkeypatch, devices.Gpu("NVIDIA H200", (9, 0)))
    (verdict,) = in_fp8(form, quantization)
    assert (verdict.kernel.name, verdict.accepted) == (f"triton_{form}_w8a16", True)
    assert "--quantization fp8 rounds them" in verdict.remark


def test_fp8_is_multiplied_on_a_gpu_alone_in_whole_blocks_and_not_in_float32(monkeypatch):
    pytest.importorskip("triton")
    chip(monkeypatch, devices.Gpu("NVIDIA H200", (9, 0)))
    assert [found.reasons[0].partition(":")[0] for found in in_fp8("fp8", device="cpu")] == ["device"] * 2
    assert in_fp8("fp8_block", "auto", float32=True) == []
    assert [found.reasons for found in in_fp8("fp8_block", inputs=4100)] == [
        ("inputs: 4100 is not a multiple of 128",)
    ] * 2


@pytest.mark.parametrize(
    ("mask", "band"),
    [
        (Causal(), Band(None, 0)),
        (Causal() & Window(left=4, right=2), Band(4, 0)),
        (Window(left=None, right=3) & Window(left=2, right=None), Band(2, 3)),
        (Window(left=4, dilation=2), None),
        (Causal() | Window(left=1), None),
        (Causal() & Strided(2), None),
    ],
)
def test_masks_that_are_bands_are_known_as_such(mask, band):
    assert band_of(mask) == band


def test_words_in_order_are_accepted_once():
    condition = InOrder((("one",), ("two", "three")))
    for accepted in ((), ("one", "two"), ("three", "two"), ("one", "three", "two")):
        assert condition.refuses(accepted) is None
    for refused in (("two", "one"), ("two", "two"), ("four",)):
        assert "one, then two and three" in str(condition.refuses(refused))
