"""Waiting for an answer: what this process stands still is not taken for the other side's silence."""

import asyncio
import time

import pytest
from attn_gateway.standstills import answer


async def test_an_answer_that_comes_soon_after_a_standstill_of_this_process_is_in_time() -> None:
    asyncio.get_running_loop().call_later(0.05, time.sleep, 1.5)
    began = time.monotonic()
    await answer(asyncio.to_thread(time.sleep, 1.7), 1.0)
    assert time.monotonic() - began >= 1.7


async def test_what_never_answers_is_given_up_and_cancelled() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await answer(never, 0.1)
    assert never.cancelled()
