"""The Ray actor that holds one model and its engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from attn_core.errors import Unavailable

from attn_serve.answers import Chunk, EmbeddingsAnswer, LoadAnswer, MapAnswer, ModelInfo
from attn_serve.hosting import Host, open_host
from attn_serve.requests import Asked, EngineSettings, MapsWanted, TextsWanted


class EngineActor:
    """An engine host behind Ray calls. All completions share one stream of chunks, `events`."""

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._host: Host | None = None
        self._starting = asyncio.Lock()
        self._news: asyncio.Queue[list[Chunk]] = asyncio.Queue()

    async def start(self) -> ModelInfo:
        """Load the model, unless that is done; also after Ray restarted this actor."""
        async with self._starting:
            if self._host is None:
                loop = asyncio.get_running_loop()

                def deliver(chunks: list[Chunk]) -> None:
                    loop.call_soon_threadsafe(self._news.put_nowait, chunks)

                self._host = await asyncio.to_thread(open_host, self._folder, self._settings, deliver)
            return self._host.info

    async def events(self) -> AsyncIterator[list[Chunk]]:
        """Chunks of all completions, everything that is ready at a time."""
        while True:
            chunks = await self._news.get()
            while not self._news.empty():
                chunks = chunks + self._news.get_nowait()
            yield chunks

    async def pid(self) -> int:
        """The process that holds the model, for those who watch or kill processes."""
        return os.getpid()

    async def submit(self, asked: Asked) -> None:
        """Begin what is asked."""
        self._running().submit(asked)

    async def cancel(self, request: str) -> None:
        """End what was begun within one engine step."""
        if self._host is not None:
            self._host.cancel(request)

    async def embed(self, wanted: TextsWanted) -> EmbeddingsAnswer:
        """A vector of length 1 for each text."""
        return await asyncio.wrap_future(self._running().embed(wanted))

    async def attention_maps(self, wanted: MapsWanted) -> list[MapAnswer]:
        """Attention weights."""
        return await asyncio.to_thread(self._running().attention_maps, wanted)

    async def load(self) -> LoadAnswer:
        """How busy the engine is."""
        return self._running().load()

    async def stop(self, grace: float) -> None:
        """Finish what runs, for up to `grace` seconds."""
        if self._host is not None:
            await asyncio.to_thread(self._host.stop, grace)

    def _running(self) -> Host:
        if self._host is None:
            raise Unavailable("the engine is being started again")
        return self._host
