"""An engine in this process: tests, notebooks, a laptop without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from attn_core.errors import Unavailable

from attn_serve.answers import (
    Chunk,
    EmbeddingsAnswer,
    LoadAnswer,
    MapAnswer,
    ModelInfo,
    SequenceAnswer,
    TokenizedAnswer,
)
from attn_serve.engines.scores import score_all
from attn_serve.engines.streams import Streams
from attn_serve.hosting import Host, open_host
from attn_serve.requests import Asked, EngineSettings, Generation, MapsWanted, PromptInput, Scored, TextsWanted


class InProcessEngine:
    """Runs the engine in a thread of this process."""

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._streams = Streams()
        self._host: Host | None = None

    async def start(self) -> ModelInfo:
        """Load the model."""
        loop = asyncio.get_running_loop()

        def deliver(chunks: list[Chunk]) -> None:
            loop.call_soon_threadsafe(self._streams.deliver, chunks)

        self._host = await asyncio.to_thread(open_host, self._folder, self._settings, deliver)
        return self._host.info

    def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """The chunks of a completion."""
        return self._follow(generation)

    async def score(self, wanted: Sequence[Scored]) -> list[SequenceAnswer]:
        """Log probabilities of given sequences."""
        return await score_all(self._follow, wanted)

    async def tokenize(self, prompt: PromptInput) -> TokenizedAnswer:
        """The tokens of a prompt."""
        return self._running().tokenize(prompt)

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
        """Finish, then free everything."""
        if self._host is not None:
            host, self._host = self._host, None
            await asyncio.to_thread(host.stop, grace)

    def _follow(self, asked: Asked) -> AsyncIterator[Chunk]:
        host = self._running()

        async def submit(asked: Asked) -> None:
            host.submit(asked)

        async def cancel(request: str) -> None:
            host.cancel(request)

        return self._streams.follow(asked, submit, cancel)

    def _running(self) -> Host:
        if self._host is None:
            raise Unavailable("the engine is not running")
        return self._host
