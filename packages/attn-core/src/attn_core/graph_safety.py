"""The reasons why a step cannot be recorded once and replayed, as a CUDA graph.

A recorded step runs the same work on the device each time, over inputs at fixed addresses
(`attn_core.stores.StaticStep`). Code that finds a reason raises `NotGraphSafe` with it; `attn explain` reports it
before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

from attn_core.states import Paged, Slot, Source, StateSpecs

ASKS_THE_HOST = "a layer reads the number of cached tokens of each request on the host"
ASKS_FOR_LENGTHS = "a layer reads the number of new tokens of each request on the host"
NO_BLOCKS = "the cache does not store rows in blocks of a fixed size"
GATHERED = 1024
"""The largest sliding window whose rows a recorded step gathers: always all of them, however short a request is."""
REPLAYED = "every step recomputes the whole sequence"


P = ParamSpec("P")
T = TypeVar("T")
Owned = dict[int, object]
"""What a recorded step reads of caches (`device_cache`), by `id`."""

_static: ContextVar[Owned | None] = ContextVar("static", default=None)


@contextmanager
def static_step(owned: Owned) -> Iterator[None]:
    """A context in which a step over static inputs is computed: its positions are known to be within the model's
    context length, so that no layer needs to wait for the device to check them.

    What the step obtains from a `device_cache` is added to `owned`, which lives as long as the recorded step: it reads
    the same addresses in every replay, also when the cache has evicted what was there.
    """
    token = _static.set(owned)
    try:
        yield
    finally:
        _static.reset(token)


def in_static_step() -> bool:
    """Whether the caller runs within `static_step`."""
    return _static.get() is not None


def device_cache(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`functools.lru_cache` for functions that return tensors on a device, which recorded steps may read."""

    def cached(function: Callable[P, T]) -> Callable[P, T]:
        lookup = lru_cache(maxsize)(function)

        @wraps(function)
        def get(*args: P.args, **kwargs: P.kwargs) -> T:
            found: T = lookup(*args, **kwargs)  # type: ignore[arg-type] # what is not hashable raises TypeError
            owned = _static.get()
            if owned is not None:
                owned[id(found)] = found
            return found

        return get

    return cached


def state_reason(layer: str, states: StateSpecs, max_query_len: int) -> str | None:
    """Why steps of up to `max_query_len` tokens of a request over these states of a layer cannot be recorded; None if
    they can."""
    if any(isinstance(spec, Source) for spec in states.values()):
        return f"{layer} attends to an encoder's states"
    if max_query_len > 1 and any(isinstance(spec, Slot) for spec in states.values()):
        return f"{layer} has states of fixed size, which each prompt updates over its own number of tokens"
    if any(isinstance(spec, Paged) and spec.every > 1 for spec in states.values()):
        return f"{layer} writes one row per several tokens, so that the number of new rows differs between steps"
    return None


def gathers(rows: str) -> str:
    """Why a step that gathers cached rows is not recorded: their number is known only on the device."""
    return f"{rows} are gathered before they are read"


def always_as_many(window: int | None) -> bool:
    """Whether a step that gathers the rows of this window (None for all rows) can be recorded: only for a narrow
    window, of which it always gathers the same number of rows."""
    return window is not None and window <= GATHERED


def plans_on_the_host(kernel: str) -> str:
    """Why a step is not recorded whose kernel plans its work on the host before each step."""
    return f"the kernel {kernel} plans each step on the host"
