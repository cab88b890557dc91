"""Log probabilities of given sequences, computed by the running engine among its other work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from attn_serve.answers import Chunk, SequenceAnswer, TokenAnswer
from attn_serve.requests import Scored

Follow = Callable[[Scored], AsyncIterator[Chunk]]
"""Begins and yields the news; closing it early cancels."""


async def score_all(follow: Follow, wanted: Sequence[Scored]) -> list[SequenceAnswer]:
    """The scores of all sequences; raises the first error. An error, or being cancelled, cancels all that are left."""
    running = [asyncio.ensure_future(_score(follow, one)) for one in wanted]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _score(follow: Follow, wanted: Scored) -> SequenceAnswer:
    tokens: list[TokenAnswer] = []
    async with aclosing(follow(wanted)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            tokens += chunk.tokens
    return SequenceAnswer(tuple(tokens))
