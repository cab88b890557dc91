"""Many tasks over one stream of outputs: handing each output to whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from attn_core.errors import AttnError
from attn_engine import RequestOutput
from attn_host import TextTask
from attn_schema import OutputDelta


class Streams:
    """Open tasks by id. Used from one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Queue[RequestOutput | AttnError]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand each output to its task; those nobody waits for any more are dropped."""
        for output in outputs:
            queue = self._open.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)

    def fail(self, error: AttnError) -> None:
        """End every open task with `error`."""
        for queue in self._open.values():
            queue.put_nowait(error)

    async def follow(
        self,
        task: TextTask,
        submit: Callable[[TextTask], Awaitable[None]],
        cancel: Callable[[str], Awaitable[None]],
    ) -> AsyncGenerator[OutputDelta, None]:
        """Submit, then yield deltas to the last; leaving early cancels. Raises the error that ends it."""
        queue: asyncio.Queue[RequestOutput | AttnError] = asyncio.Queue()
        self._open[task.id] = queue
        ended = False
        try:
            await submit(task)
            while not ended:
                output = await queue.get()
                if isinstance(output, AttnError):
                    raise output
                ended = output.last
                if output.error is not None:
                    raise output.error
                yield output.delta
        except AttnError:
            ended = True
            raise
        finally:
            del self._open[task.id]
            if not ended:
                await asyncio.shield(cancel(task.id))
