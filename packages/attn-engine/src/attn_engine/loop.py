"""A thread that steps an engine while it has work, and delivers its outputs."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Self

from attn_core.errors import AttnError, InternalError, Unavailable
from attn_schema import EngineStats, OutputDelta, Usage

from attn_engine.engine import Engine
from attn_engine.request import Request, RequestOutput

log = logging.getLogger(__name__)

Deliver = Callable[[RequestOutput], None]
"""Called on the loop's thread with each output of one request; must return at once."""
Listen = Callable[[Sequence[RequestOutput]], None]
"""Called on the loop's thread with all outputs of each step; must return at once."""


class EngineLoop:
    """Runs an engine on a thread of its own. All methods may be called from any thread and do not wait for a step.

    Submissions and cancellations take effect before the next step. `listen` is called with all outputs of each step; a
    request may also have a `deliver` callback of its own. As a context manager it calls `stop` on exit.
    """

    def __init__(self, engine: Engine, listen: Listen | None = None) -> None:
        self._engine = engine
        self._listen = listen
        self._changed = threading.Condition()
        self._calls: list[Callable[[], object]] = []
        self._active: dict[str, Deliver | None] = {}
        self._closed = False
        self._stopping = False
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="attn-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver | None = None) -> str:
        """Accept a request and return its id; raises what `Engine.submit` raises."""
        self._engine.admit(request)
        with self._changed:
            if self._closed:
                self._engine.admission.left(request.id)
                raise Unavailable("the engine takes no new requests: it is shutting down")
            self._active[request.id] = deliver
            self._calls.append(partial(self._begin, request))
            self._changed.notify_all()
        return request.id

    def cancel(self, request_id: str) -> None:
        """End the request before the next step; unknown ids are ignored."""
        with self._changed:
            self._calls.append(partial(self._engine.cancel, request_id))
            self._changed.notify_all()

    def call(self, function: Callable[[Engine], None]) -> Future[None]:
        """Call a function with the engine on the loop's thread, before the next step; the future gets its exception."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                function(self._engine)
            except Exception as error:  # noqa: BLE001 -- the caller's
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._changed:
            if self._closed:
                raise Unavailable("the engine is shutting down")
            self._calls.append(run)
            self._changed.notify_all()
        return done

    def stream(self, request: Request) -> Iterator[RequestOutput]:
        """Submit a request and yield its outputs as they arrive; leaving the iteration early cancels the request."""
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self.submit(request, outputs.put)
        return self._stream(request.id, outputs)

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def stats(self) -> EngineStats:
        """The engine's stats after the last step."""
        return self._stats

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait, at most `timeout` seconds, until all have ended; returns whether they have."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._closed = True
            while self._active:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def stop(self, error: AttnError | None = None) -> None:
        """End all requests, with `error` or as cancelled, deliver their last outputs and end the thread."""
        with self._changed:
            self._closed = self._stopping = True
            if error is not None:
                self._calls.append(partial(self._engine.fail_all, error))
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _stream(self, request_id: str, outputs: queue.SimpleQueue[RequestOutput]) -> Iterator[RequestOutput]:
        try:
            while True:
                output = outputs.get()
                yield output
                if output.last:
                    return
        finally:
            self.cancel(request_id)

    def _run(self) -> None:
        try:
            while self._await_work():
                self._deliver(self._step())
        finally:
            self._abandon()

    def _await_work(self) -> bool:
        """Wait until there are calls or work, and execute the calls; False when the loop is to end."""
        with self._changed:
            while not (self._calls or self._stopping or not self._engine.idle):
                self._changed.wait()
            calls, self._calls = self._calls, []
            stopping = self._stopping
        for call in calls:
            call()
        if stopping:
            for request_id in list(self._active):
                self._engine.cancel(request_id)
            self._deliver(self._step())
        return not stopping

    def _begin(self, request: Request) -> None:
        try:
            self._engine.begin(request)
        except AttnError as error:
            self._engine.admission.left(request.id)
            self._deliver([_failure(request.id, error)])

    def _step(self) -> list[RequestOutput]:
        try:
            return self._engine.step()
        except Exception as error:
            # The request at fault is unknown, and the KV cache may be partially written.
            log.exception("a step failed; all running requests end")
            self._engine.fail_all(InternalError(f"a step failed: {type(error).__name__}"))
            return self._engine.step()

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        self._stats = self._engine.stats()
        with self._changed:
            delivers = [(output, self._active.get(output.request_id)) for output in outputs]
            for output in outputs:
                if output.last:
                    self._active.pop(output.request_id, None)
            self._changed.notify_all()
        if self._listen is not None and outputs:
            self._call(self._listen, outputs)
        for output, deliver in delivers:
            if deliver is not None and not self._call(deliver, output) and not output.last:
                self._engine.cancel(output.request_id)

    def _call(self, receiver: Callable[..., None], outputs: object) -> bool:
        try:
            receiver(outputs)
        except Exception:
            log.exception("an output callback failed")
            return False
        return True

    def _abandon(self) -> None:
        with self._changed:
            self._closed = True
            left = list(self._active)
        gone = Unavailable("the engine has ended")
        self._deliver([_failure(request_id, gone) for request_id in left])


def _failure(request_id: str, error: AttnError) -> RequestOutput:
    return RequestOutput(request_id, OutputDelta(usage=Usage()), error)
