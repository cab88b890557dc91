from __future__ import annotations

import pytest
import torch
from artefacts import SHARED_MEMORY, artefact
from attn_core import AttentionSpec, Causal, Heads, Window
from attn_core.batch import StaticBatch, StaticRows
from attn_core.distributions import Softmax, SoftmaxWithSink
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.modifiers import Alibi, SoftCap, T5Bias
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.paged import decode
from paged_launches import POOL, fields_of

REQUESTS, BLOCKS = 4, 64
REGISTERS = 255
SHIPPED = {
    "128": {"size": 128},
    "64, a window": {"size": 64, "mask": Window(left=100)},
    "latents of 128 heads": {"size": 512, "form": "latent", "heads": (128, 1)},
}
OTHER_SHIPPED = {
    "64": {"size": 64, "heads": (9, 3)},
    "256": {"size": 256},
    "128, int8": {"size": 128, "form": "int8"},
    "128, int4": {"size": 128, "form": "int4"},
    "128, float32": {"size": 128, "dtype": torch.float32},
    "128, many heads that share keys": {"size": 128, "heads": (64, 1)},
    "latents of 16 heads": {"size": 512, "form": "latent", "heads": (16, 1)},
    "128, biases of distances": {"size": 128, "modifiers": (T5Bias(),)},
    "128, everything else": {
        "size": 128,
        "mask": Window(left=100),
        "modifiers": (SoftCap(cap=30.0), Alibi()),
        "distribution": SoftmaxWithSink(),
    },
}


def launches(size: int, *, form: str = "plain", heads=(32, 8), dtype=torch.bfloat16, **parts) -> list[Launch]:
    """The programs of a static decode step."""
    query, shared = heads
    latent = form == "latent"
    sizes = (size + 64, size) if latent else (size, size)
    counts = Heads(query=query, key_value=shared, key_size=sizes[0], value_size=sizes[1])
    spec = AttentionSpec(heads=counts, **{"mask": Causal(), "distribution": Softmax(), **parts})
    numbers = torch.zeros(REQUESTS, dtype=torch.int64)
    rows = StaticRows(
        fields_of(form, shared, size, dtype),
        numbers,
        torch.zeros(REQUESTS, BLOCKS, dtype=torch.int32),
        (),
        "plain" if latent else form,
        block_size=16,
        starts=numbers,
        ends=numbers + 1,
    )
    operands = PagedAttentionInputs(
        query=torch.empty(REQUESTS, query, sizes[0], dtype=dtype),
        batch=StaticBatch(numbers, numbers, numbers, POOL),
        rows=rows,
        requests=tuple(range(REQUESTS)),
        parameters={name: torch.zeros(shape) for name, shape in spec.weights.items()},
    )
    return decode.decode_launches(spec, operands, torch.empty(REQUESTS, query, sizes[1], dtype=dtype))


def require_ships(shape: dict) -> None:
    """Fail unless every program of a step keeps everything in registers and within shared memory."""
    found = [(launch.program.__name__, artefact(launch)) for launch in launches(**shape)]
    assert [name for name, _ in found] == ["decode_paged", "merge_decode"]
    for name, program in found:
        assert program.spills == 0, (name, program.spills, program.registers)
        assert program.registers <= REGISTERS, name
        assert program.shared <= SHARED_MEMORY, name


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """As many multiprocessors as an H200 has."""
    monkeypatch.setattr(decode, "multiprocessors", lambda _: 132)
    monkeypatch.setattr("attn_kernels_triton.paged.attend.interpreted", lambda: True)


@pytest.mark.parametrize("name", SHIPPED)
def test_on_hopper_programs_of_static_steps_do_not_spill(name):
    require_ships(SHIPPED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_SHIPPED)
def test_on_hopper_no_other_program_of_static_steps_spills_either(name):
    require_ships(OTHER_SHIPPED[name])


def test_launches_depend_on_the_number_of_requests_alone():
    first, second = (launches(128) for _ in range(2))
    assert [launch.programs for launch in first] == [launch.programs for launch in second]
    splits = first[0].call.splits.value
    assert first[0].programs == REQUESTS * 8 * splits
    assert splits == 8
