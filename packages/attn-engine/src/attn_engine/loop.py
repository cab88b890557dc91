"""A thread that steps an engine while there is work and hands its news to whoever asked."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Self

from attn_core.errors import AlreadyExists, AttnError, InternalError, OutOfCapacity, Unavailable

from attn_engine.engine import Engine
from attn_engine.event import Event, Finish, FinishReason, RequestUsage
from attn_engine.limits import Load
from attn_engine.request import Request

log = logging.getLogger(__name__)

Deliver = Callable[[Event], None]
"""Called on the loop's thread with each event of one request; must return at once."""
Listen = Callable[[Sequence[Event]], None]
"""Called on the loop's thread with all events of each step; must return at once."""


class EngineLoop:
    """Runs an engine on a thread of its own. All methods may be called from any thread and do not wait for a step.

    Submissions and cancellations take effect before the next step. `listen` is told everything, step by step; a request
    may have a `deliver` of its own too. As a context manager it stops at the end.
    """

    def __init__(self, engine: Engine, listen: Listen | None = None) -> None:
        self._engine = engine
        self._listen = listen
        self._changed = threading.Condition()
        self._orders: list[Callable[[], object]] = []
        self._active: dict[str, Deliver | None] = {}
        self._closed = False
        self._stopping = False
        self._load = engine.load()
        self._thread = threading.Thread(target=self._run, name="attn-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver | None = None) -> str:
        """Accept a request and return its id; raises what `Engine.submit` raises."""
        self._engine.check(request)
        with self._changed:
            if self._closed:
                raise Unavailable("the engine takes no new requests: it is shutting down")
            if request.id in self._active:
                raise AlreadyExists(f"a request with the id {request.id!r} is running", id=request.id)
            most = self._engine.limits.waiting
            if len(self._active) - self._load.running >= most:
                raise OutOfCapacity(f"{most} requests are waiting already", waiting=most)
            self._active[request.id] = deliver
            self._orders.append(partial(self._begin, request))
            self._changed.notify_all()
        return request.id

    def cancel(self, id: str) -> None:  # noqa: A002  (the field's name)
        """End the request before the next step; one that is not known is left alone."""
        with self._changed:
            self._orders.append(partial(self._engine.cancel, id))
            self._changed.notify_all()

    def stream(self, request: Request) -> Iterator[Event]:
        """Submit, and yield the events of the request as they come; leaving the iteration early cancels it."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(request, events.put)
        return self._events(request.id, events)

    def load(self) -> Load:
        """How busy the engine was after the last step."""
        return self._load

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait, at most `timeout` seconds, until all have ended; whether they have."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._closed = True
            while self._active:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def stop(self) -> None:
        """Cancel what is still running, deliver its last events and end the thread."""
        with self._changed:
            self._closed = self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _events(self, id: str, events: queue.SimpleQueue[Event]) -> Iterator[Event]:  # noqa: A002
        try:
            while True:
                event = events.get()
                yield event
                if event.last:
                    return
        finally:
            self.cancel(id)

    def _run(self) -> None:
        try:
            while self._await_work():
                self._deliver(self._step())
        finally:
            self._abandon()

    def _await_work(self) -> bool:
        """Wait for orders or work, carry out the orders; False when the loop is to end."""
        with self._changed:
            while not (self._orders or self._stopping or not self._engine.idle):
                self._changed.wait()
            orders, self._orders = self._orders, []
            stopping = self._stopping
        for order in orders:
            order()
        if stopping:
            for id in list(self._active):  # noqa: A001
                self._engine.cancel(id)
            self._deliver(self._step())
        return not stopping

    def _begin(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except AttnError as error:
            self._deliver([_failure(request.id, error)])

    def _step(self) -> list[Event]:
        try:
            return self._engine.step()
        except Exception as error:
            # Nobody knows whose fault it was, and the states of the step may be half written.
            log.exception("a step failed; all running requests end")
            self._engine.fail_all(InternalError(f"a step failed: {type(error).__name__}"))
            return self._engine.step()

    def _deliver(self, events: Sequence[Event]) -> None:
        self._load = self._engine.load()
        with self._changed:
            delivers = [(event, self._active.get(event.request)) for event in events]
            for event in events:
                if event.last:
                    self._active.pop(event.request, None)
            self._changed.notify_all()
        if self._listen is not None and events:
            self._call(self._listen, events)
        for event, deliver in delivers:
            if deliver is not None and not self._call(deliver, event) and not event.last:
                self._engine.cancel(event.request)

    def _call(self, receiver: Callable[..., None], news: object) -> bool:
        try:
            receiver(news)
        except Exception:
            log.exception("a receiver of events failed")
            return False
        return True

    def _abandon(self) -> None:
        with self._changed:
            self._closed = True
            left = list(self._active)
        gone = Unavailable("the engine has ended")
        self._deliver([_failure(id, gone) for id in left])  # noqa: A001


def _failure(id: str, error: AttnError) -> Event:  # noqa: A002
    usage = RequestUsage(prompt_tokens=0, new_tokens=0, computed_tokens=0)
    finish = Finish(reason=FinishReason.FAILED, usage=usage, error=error)
    return Event(request=id, finish=finish, usage=usage)
