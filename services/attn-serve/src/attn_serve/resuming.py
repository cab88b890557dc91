"""Continues tasks on another engine when the engine that computes them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from attn_engine.host import TextTask
from attn_schema import OutputDelta, SamplingParams
from attn_schema.resuming import StreamProgress, seeded

from attn_serve.streams import EngineLost

Answer = TypeVar("Answer")

Follow = Callable[[TextTask], AsyncGenerator[OutputDelta, None]]
"""Submits a task to an engine and yields its deltas; raises `EngineLost` if the engine is lost before the last."""


async def resumed(task: TextTask, follow: Follow) -> AsyncGenerator[OutputDelta, None]:
    """Yield all deltas of a task; if its engine is lost, the rest is computed by another one.

    Raises `DeadlineExceeded` if the deadline passes meanwhile, and `EngineLost` if no engine is available for two
    minutes, or several engines in a row are lost while they compute the task.
    """
    if isinstance(task.params, SamplingParams):
        task = replace(task, params=seeded(task.params))
    progress = StreamProgress(task.resume, task.timeout)
    attempt = 0
    while True:
        part = replace(
            task, id=f"{task.id}.{attempt}", timeout=progress.remaining(), resume=progress.resume
        )  # outputs that a lost engine may still send have another id
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
    """Await an idempotent call; repeats it for up to `timeout` seconds if its engine is lost."""
    progress = StreamProgress(None, timeout)
    while True:
        try:
            return await call()
        except EngineLost as lost:
            await asyncio.sleep(progress.wait_after(lost, accepted=False))
