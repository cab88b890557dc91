"""Laws of states: what is stored is read, a preempted request goes on as before, and few bits lose little."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from attn_core import Capability, Field, Paged, StateSpecs
from torch import Tensor

from attn_testing.law import LawBroken, MechanismLaw, require, require_same
from attn_testing.laws.decoding import silent_where_nothing_decodes
from attn_testing.laws.numerics import require_mostly_same
from attn_testing.memory import DictionaryStore
from attn_testing.serving import LAYER, Serving
from attn_testing.subject import Case, Subject

FURTHER = 12
"""The number of tokens after which a changed state must have changed an output."""

PHASES = 4
"""The number of lengths after which states are changed: a row that waits for the next ones may be there at few."""

SEEN = 1e-9


class StatesAreRead(MechanismLaw):
    """Every stored field changes later outputs, in some case, and so does the oldest row of a windowed state."""

    def test_every_stored_field_is_read(self, subject: Subject) -> None:
        cases = [case for case in subject.cases if silent_where_nothing_decodes(case) is None]
        named = {(state, field) for case in cases for state, spec in case.specs.items() for field in spec.fields}
        for case in reversed(cases):
            named -= {address for address in sorted(named) if reads(case, *address)}
            if not named:
                return
        unread = ", ".join(f"{state}.{field}" for state, field in sorted(named))
        require(not named, f"{unread} is stored, but never changes an output: it costs memory for nothing")

    def test_the_oldest_kept_row_is_read(self, subject: Subject) -> None:
        if subject.mechanism.can(Capability.CHOOSES):
            return
        for case in subject.cases:
            if silent_where_nothing_decodes(case):
                continue
            for name, spec in case.specs.items():
                if isinstance(spec, Paged) and spec.window is not None and 1 < spec.window < case.tokens - 1:
                    oldest_is_read(case, name, spec.window)
                    return


def reads(case: Case, state: str, field: str) -> bool:
    """Whether other values of this field of a state change the outputs of one of the next tokens."""
    if state not in case.specs or field not in case.specs[state].fields:
        return False
    rows = case.rows(case.tokens)
    return any(reads_from(case, state, field, rows, max(5, case.tokens - FURTHER - phase)) for phase in range(PHASES))


def reads_from(case: Case, state: str, field: str, rows: Tensor, start: int) -> bool:
    """`reads` for a field that is changed after `start` tokens."""
    serving = started(case, rows[:start])
    other = started(case, rows[:start])
    for held in tensors_of(other.store, state):
        change(held, field)
    try:
        for at in range(start, case.tokens):
            if different(serving.step({0: rows[at, None]})[0], other.step({0: rows[at, None]})[0]):
                return True
    except (RuntimeError, IndexError, ValueError):
        return True
    return False


def oldest_is_read(case: Case, state: str, window: int) -> None:
    """Raise `LawBroken` unless the oldest row of a window changes an output at one of several positions."""
    rows = case.rows(case.tokens)
    serving = started(case, rows[:window])
    for at in range(window, min(case.tokens, 2 * window + 2)):
        other: Any = copy.deepcopy(serving.store)
        held = other._held[0].pages[LAYER, state][at - window + 1]  # noqa: SLF001  # the kit's own store
        for field in held:
            change(held, field)
        changed = Serving(case, other)
        changed.done[0] = at
        before = serving.step({0: rows[at, None]})[0]
        if different(changed.step({0: rows[at, None]})[0], before):
            return
    raise LawBroken(f"the state {state} keeps {window} rows, but the oldest one never changes an output")


def started(case: Case, rows: Tensor) -> Serving:
    """A request with these rows as its prompt."""
    serving = Serving(case)
    serving.open(0, case.source(case.tokens))
    serving.step({0: rows})
    return serving


def tensors_of(store: Any, state: str) -> list[dict[str, Tensor]]:
    """All rows that the kit's store holds for a state of request 0."""
    held, address = store._held[0], (LAYER, state)  # noqa: SLF001  # the kit's own store
    found = list(held.pages.get(address, {}).values())
    return found + [kind[address] for kind in (held.slots, held.sources) if address in kind]


def change(row: dict[str, Tensor], field: str) -> None:
    """Replace the values of a field by others."""
    if field in row:
        value = row[field]
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        larger = 1 + 3 * value.abs().max()
        row[field] = noise.to(value.dtype) * larger if value.is_floating_point() else value + 1


def different(one: Tensor, other: Tensor) -> bool:
    """Whether outputs differ by more than rounding, or one is not finite."""
    return not bool(((one - other).abs() <= SEEN).all())


PROMPTS = {0: 6, 1: 4}
DECODED = 9


class Preemption(MechanismLaw):
    """A request that is preempted and computed again, beside others and by another worker, goes on as if it never was.

    Its tokens are then a prompt; the other worker has a layer of its own with the same weights.
    """

    cases_at_most = 2

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_a_preempted_request_goes_on_as_before(self, case: Case) -> None:
        rows = {name: case.rows(27, seed=50 + name) for name in PROMPTS}
        sources = {name: case.source(3 + name, seed=60 + name) for name in PROMPTS}
        serving, found = Serving(case), {name: torch.zeros_like(given) for name, given in rows.items()}

        def step(**counts: int) -> None:
            numbers = {int(name[1:]): count for name, count in counts.items()}
            new = {n: rows[n][serving.done[n] : serving.done[n] + count] for n, count in numbers.items()}
            starts = {n: serving.done[n] for n in numbers}
            for n, out in serving.step(new).items():
                found[n][starts[n] : starts[n] + len(out)] = out

        for name in PROMPTS:
            serving.open(name, sources[name])
        step(r0=PROMPTS[0], r1=PROMPTS[1])
        for _ in range(DECODED):
            step(r0=1, r1=1)
        serving.store.release(0)
        step(r1=1)
        step(r1=1)
        serving.layer = case.build()
        serving.open(0, sources[0])
        step(r0=PROMPTS[0] + DECODED + 1, r1=1)
        for counts in ({"r0": 1}, {"r1": 1}, {"r1": 1}, {"r0": 1}, {"r1": 1, "r0": 1}):
            step(**counts)
        for name, done in serving.done.items():
            alone = Serving(case)
            alone.open(name, sources[name])
            expected = alone.step({name: rows[name][:done]})[name]
            what = f"outputs of request {name} (0 was preempted, 1 was not) and of that request alone"
            require_same(found[name][:done], expected, what, case.tolerance)


class StepPrecision(MechanismLaw):
    """Steps of a float32 or bfloat16 layer return that dtype; float32 steps are near to float64 steps.

    The latter keep all states in float64: a state of fewer bits than the layer's loses what the layer computed.
    """

    cases_at_most = 2

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_steps_in_fewer_bits_give_nearly_the_same(self, case: Case) -> None:
        half, single = (
            stepped(case, case.build(dtype=dtype), DictionaryStore({LAYER: case.specs}, name), dtype)
            for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
        )
        for found, dtype in ((half, torch.bfloat16), (single, torch.float32)):
            require(found.dtype == dtype, f"steps of a {dtype} layer return {found.dtype}")
        layer = case.build(dtype=torch.float32).double()
        exact = stepped(case, layer, DictionaryStore({LAYER: unrounded(case)}), torch.float64)
        if case.mechanism.can(Capability.CHOOSES):
            require_mostly_same(single.double(), exact, "float32 and float64 steps", 1e-4)
        else:
            require_same(single.double(), exact, "float32 and float64 steps", 1e-4)


def unrounded(case: Case) -> StateSpecs:
    """The states of a case, in which all fields of floating-point numbers have the dtype of the layer."""

    def wide(row: Field) -> Field:
        floats = row.dtype is not None and getattr(torch, row.dtype).is_floating_point
        return Field(row.shape) if floats else row

    return {
        name: dataclasses.replace(spec, fields={field: wide(row) for field, row in spec.fields.items()})
        for name, spec in case.specs.items()
    }


def stepped(case: Case, layer: Any, store: DictionaryStore, dtype: torch.dtype) -> Tensor:
    """The outputs [tokens, width] of a prompt and further tokens of float32 inputs, in this dtype."""
    rows, source, serving = case.rows(TOKENS).float().to(dtype), case.source(5), Serving(case, store, layer)
    serving.open(0, None if source is None else source.float().to(dtype))
    return torch.cat([serving.step({0: part})[0] for part in (rows[:5], *rows[5:, None])])


TOKENS = 12
