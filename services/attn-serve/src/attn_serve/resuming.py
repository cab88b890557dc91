"""Tasks that outlive the engine that computes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from attn_host import TextTask
from attn_schema import OutputDelta, SamplingParams
from attn_schema.resuming import StreamProgress, seeded

from attn_serve.streams import EngineLost

Answer = TypeVar("Answer")

Follow = Callable[[TextTask], AsyncGenerator[OutputDelta, None]]
"""Submits a task somewhere and yields its deltas; raises `EngineLost` where they end too soon."""


async def resumed(task: TextTask, follow: Follow) -> AsyncGenerator[OutputDelta, None]:
    """The deltas of a task, to the last: where its engine is lost, the rest is computed elsewhere.

    Raises `DeadlineExceeded` when the deadline passes meanwhile, and `EngineLost` where no engine comes back in two
    minutes, or several in a row die of the task.
    """
    if isinstance(task.params, SamplingParams):
        task = replace(task, params=seeded(task.params))
    progress = StreamProgress(task.resume, task.timeout)
    attempt = 0
    while True:
        part = replace(
            task, id=f"{task.id}.{attempt}", timeout=progress.remaining(), resume=progress.resume
        )  # what a lost engine may still send is of another id
        try:
            async with aclosing(follow(part)) as deltas:
                async for delta in deltas:
                    yield progress.take(delta)
        except EngineLost as lost:
            await asyncio.sleep(progress.wait_after(lost, accepted=lost.accepted))
            attempt += 1
        else:
            return


async def repeated(call: Callable[[], Awaitable[Answer]], timeout: float | None = None) -> Answer:  # noqa: ASYNC109
    """The answer of a call that may be made twice: again where its engine is lost, for up to `timeout` seconds."""
    progress = StreamProgress(None, timeout)
    while True:
        try:
            return await call()
        except EngineLost as lost:
            await asyncio.sleep(progress.wait_after(lost, accepted=False))
