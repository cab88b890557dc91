"""Runs the checks of submissions: each tenant's one at a time, apart from all other calls, until the caller leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from attn_core.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 8
"""Maximum number of checks that run at the same time."""

_STOP: ContextVar[threading.Event | None] = ContextVar("stop", default=None)


def require_wanted() -> None:
    """Raise `Unavailable` if nobody waits for the result of the running check any more; called by whatever is slow."""
    stop = _STOP.get()
    if stop is not None and stop.is_set():
        raise Unavailable("the check was stopped, as its caller has left")


class Checks:
    """Threads of their own for checks, so that calls that only read or write records never wait for one."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "attn-train-check")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """A context that only one task of a tenant is in at a time, so that no tenant takes all threads."""
        turn = self._turns.setdefault(tenant, asyncio.Semaphore())
        async with turn:
            yield

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `work` returns in a thread; if this task is cancelled, `require_wanted` raises in the thread."""
        stop = threading.Event()

        def stoppable() -> R:
            token = _STOP.set(stop)
            try:
                require_wanted()
                return work(*args, **kwargs)
            finally:
                _STOP.reset(token)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, stoppable)
        finally:
            stop.set()

    def close(self) -> None:
        """Drop the checks that wait; those that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
