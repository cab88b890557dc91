"""Waiting for an answer from elsewhere, without taking this process's own standstill for the other side's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from math import ceil
from typing import TypeVar

SLICE_SECONDS = 0.25
"""The most that one standstill of this process counts."""
T = TypeVar("T")


async def answer(awaitable: Awaitable[T], seconds: float) -> T:
    """Wait for a result; raises `TimeoutError`, and cancels what is awaited, after `seconds` of this event loop.

    A process may be stopped or get no processor for longer than that: `asyncio.timeout` gives up then even if the
    result has come. Here a standstill counts `SLICE_SECONDS`, however long it was.
    """
    future = asyncio.ensure_future(awaitable)
    slices = ceil(seconds / SLICE_SECONDS)
    try:
        for _ in range(slices):
            done, _ = await asyncio.wait({future}, timeout=seconds / slices)
            if done:
                return future.result()
        raise TimeoutError
    finally:
        future.cancel()
