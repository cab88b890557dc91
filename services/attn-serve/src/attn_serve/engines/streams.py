"""Many requests over one stream of chunks: sorting them out to whoever waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from attn_core.errors import AttnError

from attn_serve.answers import Chunk
from attn_serve.requests import Asked


class Streams:
    """Open requests by request id. Used from one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Queue[Chunk]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def deliver(self, chunks: Iterable[Chunk]) -> None:
        """Hand each chunk to its request; those nobody waits for any more are dropped."""
        for chunk in chunks:
            queue = self._open.get(chunk.request)
            if queue is not None:
                queue.put_nowait(chunk)

    def fail(self, error: AttnError) -> None:
        """End every open request with `error`."""
        self.deliver([Chunk(request=request, error=error) for request in self._open])

    async def follow(
        self,
        asked: Asked,
        submit: Callable[[Asked], Awaitable[None]],
        cancel: Callable[[str], Awaitable[None]],
    ) -> AsyncIterator[Chunk]:
        """Submit, then yield chunks to the last; leaving early cancels. Raises the error that ends it."""
        queue: asyncio.Queue[Chunk] = asyncio.Queue()
        self._open[asked.id] = queue
        ended = False
        try:
            await submit(asked)
            while not ended:
                chunk = await queue.get()
                ended = chunk.last
                if chunk.error is not None:
                    raise chunk.error
                yield chunk
        except AttnError:
            ended = True
            raise
        finally:
            del self._open[asked.id]
            if not ended:
                await asyncio.shield(cancel(asked.id))
