"""Decode steps of recurrences over states in slots: correctness on this GPU, and speed relative to copying."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attn_core.kernels.recurrent_step import RecurrentStepInputs, RecurrentStepSpec
from attn_kernels_triton.recurrence.step import run_step
from recurrences import judged
from timing import copied_per_second, seconds

TESTS = Path(__file__).resolve().parents[2] / "packages" / "attn-kernels-triton" / "tests"
sys.path += [str(TESTS / "compiled"), str(TESTS / "interpreted")]

from step_definition import defined, drawn, mapped  # noqa: E402 -- of the tests of these programs
from step_launches import SPECS  # noqa: E402

SLOTS, TAKEN = [5, 0, 3, 6, 1], 8
"""The slots of the requests whose steps are checked, and the number of slots."""
REQUESTS, HEADS = 64, 32
"""The numbers of requests and heads of the timed steps, with states of 128 x 128 elements."""


def cases(*, small: bool) -> Iterator[tuple[str, RecurrentStepSpec]]:
    """The decode step of each mechanism, with head size 128, and with sizes that are not powers of two."""
    for name, spec in SPECS.items():
        if small:
            yield name, dataclasses.replace(spec, key_size=16, value_size=16)
            continue
        yield name, spec
        yield f"{name}, odd sizes", dataclasses.replace(spec, key_size=52, value_size=70)


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """For each mechanism and element type, errors of outputs and states against float64, and whether they are right."""
    for name, spec in cases(small=small):
        for dtype in (torch.float32,) if small else (torch.bfloat16, torch.float32):
            given = drawn(spec, dtype, SLOTS[:1] if small else SLOTS, taken=TAKEN)
            exact, usual = (defined(given, kind) for kind in (torch.float64, torch.float32))
            found, again = (stepped(given, device) for _ in range(2))
            for part, truth in exact.items():
                three = found[part].cpu(), usual[part].to(found[part].dtype), truth
                same = torch.equal(found[part], again[part])
                yield judged(f"decode step, {name}, {dtype}", part, three, same=same)


def stepped(given: RecurrentStepInputs, device: str) -> dict[str, torch.Tensor]:
    """The output and the states after a step on the device."""
    there = mapped(given, lambda tensor: tensor.to(device, copy=True))
    return {"out": run_step(there), **there.state.fields}


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Decoding of one token for 64 requests, all kernels of a step: the fraction of the copy bandwidth for states."""
    copied = copied_per_second(device)
    requests = 2 if small else REQUESTS
    for name, spec in SPECS.items():
        sizes = {"num_heads": HEADS, "num_key_heads": HEADS * spec.num_key_heads // spec.num_heads or 1}
        joined = HEADS if spec.norm_heads > 1 else spec.norm_heads
        changes = {"key_size": 16, "value_size": 16} if small else {**sizes, "norm_heads": joined}
        given = drawn(dataclasses.replace(spec, **changes), torch.bfloat16, list(range(requests)), taken=requests + 1)
        given = mapped(given, lambda tensor: tensor.to(device))
        took = seconds(lambda given=given: run_step(given), device)
        moved = 2 * given.state.fields["S"][:requests].nbytes
        yield {"case": f"decode step, {name}", "ms": 1e3 * took, "share_of_copy": moved / took / copied}
