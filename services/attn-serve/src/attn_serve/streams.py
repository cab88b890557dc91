"""Distributes one stream of outputs to the tasks that it is for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from attn_core.errors import AttnError, Unavailable, cleaning_up
from attn_engine import RequestOutput
from attn_engine.host import TextTask
from attn_schema import OutputDelta


class EngineLost(Unavailable):
    """The engine that computed a request is gone or hands its requests over; another engine can continue them."""

    reason = "ENGINE_LOST"
    accepted = True
    """Whether the engine had accepted the request."""


class Streams:
    """The output queues of open tasks, by task id. Used from one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Queue[RequestOutput | AttnError]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Pass each output to its task; outputs of tasks that are no longer open are dropped."""
        for output in outputs:
            queue = self._open.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)

    def fail(self, error: AttnError, ids: Iterable[str] | None = None) -> None:
        """End the open tasks with these ids with `error`; all open tasks if `ids` is None."""
        for name in list(self._open) if ids is None else ids:
            if name in self._open:
                self._open[name].put_nowait(error)

    async def follow(
        self,
        task: TextTask,
        submit: Callable[[TextTask], Awaitable[None]],
        cancel: Callable[[str], Awaitable[None]],
    ) -> AsyncGenerator[OutputDelta, None]:
        """Submit a task and yield its deltas up to the last. Closing the iterator early cancels the task.

        Raises the error that ends the task.
        """
        queue: asyncio.Queue[RequestOutput | AttnError] = asyncio.Queue()
        self._open[task.id] = queue
        ended = False
        try:
            try:
                await submit(task)
            except EngineLost as lost:
                lost.accepted = False
                raise
            last = False
            while not last:
                output = await queue.get()
                if isinstance(output, AttnError):
                    raise output
                if output.error is not None:
                    raise output.error
                yield output.delta
                last = output.last
            ended = True
        except AttnError:
            ended = True
            raise
        finally:
            del self._open[task.id]
            if not ended:
                with cleaning_up("a task that nobody waits for"):
                    await asyncio.shield(cancel(task.id))
