"""What the servicers ask of an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from attn_serve.answers import (
    Chunk,
    EmbeddingsAnswer,
    LoadAnswer,
    MapAnswer,
    ModelInfo,
    SequenceAnswer,
    TokenizedAnswer,
)
from attn_serve.requests import Generation, MapsWanted, PromptInput, Scored, TextsWanted


class EngineClient(Protocol):
    """One loaded model. Errors are those of `attn_core.errors`."""

    async def start(self) -> ModelInfo:
        """Load the model; returns when it can answer."""
        ...

    def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """The chunks of a completion; closing the iterator cancels it within one engine step."""
        ...

    async def score(self, wanted: Sequence[Scored]) -> list[SequenceAnswer]:
        """Log probabilities of given sequences; being cancelled ends them within one engine step."""
        ...

    async def tokenize(self, prompt: PromptInput) -> TokenizedAnswer:
        """The tokens that `generate` would read."""
        ...

    async def embed(self, wanted: TextsWanted) -> EmbeddingsAnswer:
        """A vector of length 1 for each text; being cancelled ends it within one batch."""
        ...

    async def attention_maps(self, wanted: MapsWanted) -> list[MapAnswer]:
        """Attention weights, a layer each."""
        ...

    async def load(self) -> LoadAnswer:
        """How busy the engine is."""
        ...

    async def stop(self, grace: float) -> None:
        """Refuse new work, let running work finish for up to `grace` seconds, then free everything."""
        ...
