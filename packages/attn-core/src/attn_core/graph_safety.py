"""What keeps a step from being recorded once and repeated, as a CUDA graph: every reason, said once.

A recorded step asks the device for the same work each time, over inputs that stay where they are
(`attn_core.stores.StaticDecode`, `StaticMixed`). Whoever finds a reason raises `NotGraphSafe` with it; `attn explain`
says it before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attn_core.states import Slot, Source, StateSpecs

ASKS_THE_HOST = "a layer asks the host how many tokens each request remembers"
ASKS_FOR_LENGTHS = "a layer asks the host how many tokens each request computes"
NO_BLOCKS = "the cache does not keep rows in blocks of one size"
GATHERED = 1024
"""Rows of a sliding window that a recorded step gathers at most, for every request however short: always as many."""
REPLAYED = "every step computes the whole sequence again"


_static: ContextVar[bool] = ContextVar("static", default=False)


@contextmanager
def static_step() -> Iterator[None]:
    """While a step over inputs in place is computed: its positions are below the model's context, so nothing needs to
    wait for the device to see whether they are too far."""
    token = _static.set(True)
    try:
        yield
    finally:
        _static.reset(token)


def in_static_step() -> bool:
    """Whether this is computed for such a step."""
    return _static.get()


def state_reason(layer: str, states: StateSpecs) -> str | None:
    """Why a store cannot keep the states of a layer so that steps are recorded; None where it can."""
    if any(isinstance(spec, Source) for spec in states.values()):
        return f"{layer} attends to an encoder's states"
    return None


def mixed_state_reason(layer: str, states: StateSpecs) -> str | None:
    """Why a store cannot keep the states of a layer so that steps with prompts are recorded; None where it can."""
    if any(isinstance(spec, Slot) for spec in states.values()):
        return f"{layer} has states of fixed size, through which each prompt is carried in its own length"
    return state_reason(layer, states)


def gathers(rows: str) -> str:
    """Why steps are not recorded that copy remembered rows together: how many there are is known on the device."""
    return f"{rows} are gathered before they are read"


def always_as_many(window: int | None) -> bool:
    """Whether a step is recorded that gathers the rows of this window, None for all: those of a narrow one, whose
    number the host knows."""
    return window is not None and window <= GATHERED


def plans_on_the_host(kernel: str) -> str:
    """Why steps are not recorded whose kernel lays out its work anew at each of them."""
    return f"the kernel {kernel} plans each step on the host"
