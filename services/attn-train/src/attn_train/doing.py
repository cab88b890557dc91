"""What a worker is doing, named where it calls what may never return, so that the end of one that hangs names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TELL: ContextVar[Callable[[], None] | None] = ContextVar("tell", default=None)
_NOW: ContextVar[str] = ContextVar("now", default="")


def now() -> str:
    """Return what this thread is doing; empty outside of `doing`."""
    return _NOW.get()


@contextmanager
def telling(tell: Callable[[], None]) -> Iterator[None]:
    """A context in which `tell` is called whenever `now` changes."""
    token = _TELL.set(tell)
    try:
        yield
    finally:
        _TELL.reset(token)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A context in which this thread is in `what`, such as "the reward 'length'"."""
    token, tell = _NOW.set(what), _TELL.get() or (lambda: None)
    tell()
    try:
        yield
    finally:
        _NOW.reset(token)
        tell()
