"""Large prompts keep small ones waiting nowhere, and what is cancelled in between is not begun."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

import pytest
from attn_core.errors import DeadlineExceeded, OutOfCapacity
from attn_engine.client import TextTask
from attn_engine.host.host import ModelHost
from attn_engine.host.request_preparation import LARGE_BYTES, MAX_WAITING_BYTES, Preparation, size_of
from attn_schema import ChatMessage, Prompt, SamplingParams, StructuredOutput


class SlowHost(ModelHost):
    """Takes as long as it is told with large prompts and with chats, and no time with others."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.entered = threading.Semaphore(0)

    def submit(self, task: TextTask) -> None:
        self.entered.release()
        if len(task.prompt.text or "") > LARGE_BYTES or task.prompt.chat:
            self.let.wait(60)
        self.begun.append(task.id)

    def cancel(self, task_id: str) -> None:
        self.cancelled.append(task_id)

    def tokenize(self, prompt: Prompt) -> str:
        return (prompt.text or "").upper()


@pytest.fixture
def host():
    made = SlowHost()
    yield made
    made.let.set()


def task(text: str = "x", timeout: float | None = None) -> TextTask:
    return TextTask(prompt=Prompt(text=text), params=SamplingParams(), timeout=timeout)


LARGE = "x" * (LARGE_BYTES + 1)


def test_small_prompts_pass_large_ones_and_looping_templates(host):
    preparation = Preparation()
    chat = TextTask(prompt=Prompt(chat=(ChatMessage(role="user", content="x"),)), params=SamplingParams())
    slow = [preparation.submit(host, each) for each in (task(LARGE), task(LARGE), chat, chat, chat)]
    small = [preparation.submit(host, task()) for _ in range(20)]
    for future in small:
        future.result(timeout=60)
    assert preparation.tokenize(host, Prompt(text="abc")).result(timeout=60) == "ABC"
    assert not any(future.done() for future in slow)
    host.let.set()
    for future in slow:
        future.result(timeout=60)
    assert len(host.begun) == 25


def test_time_spent_waiting_counts_against_the_deadline(host):
    preparation = Preparation()
    first = preparation.submit(host, task(LARGE))
    late = preparation.submit(host, task(LARGE, timeout=0.01))
    time.sleep(0.05)
    host.let.set()
    first.result(timeout=60)
    with pytest.raises(DeadlineExceeded):
        late.result(timeout=60)
    assert len(host.begun) == 1


def test_what_is_cancelled_while_it_waits_is_not_begun_and_while_it_is_prepared_is_cancelled_then(host):
    preparation = Preparation()
    running, waiting = task(LARGE), task(LARGE)
    first, second = preparation.submit(host, running), preparation.submit(host, waiting)
    host.entered.acquire(timeout=60)
    preparation.cancel(host, running.id)
    preparation.cancel(host, waiting.id)
    host.let.set()
    first.result(timeout=60)
    with pytest.raises(CancelledError):
        second.result(timeout=60)
    assert host.begun == [running.id]
    assert host.cancelled.count(running.id) == 2


def test_no_more_bytes_wait_than_are_allowed(host):
    preparation = Preparation()
    text = "x" * (MAX_WAITING_BYTES // 4)
    futures = [preparation.submit(host, task(text)) for _ in range(4)]
    with pytest.raises(OutOfCapacity) as caught:
        preparation.submit(host, task(text))
    assert float(caught.value.metadata["retry_seconds"]) > 0
    host.let.set()
    for future in futures:
        future.result(timeout=60)
    preparation.submit(host, task(text)).result(timeout=60)


def test_a_grammar_weighs_more_than_a_text_of_its_length():
    grammar = SamplingParams(structured_output=StructuredOutput(regex="a" * 100))
    assert size_of(Prompt(text="a" * 100)) == 100
    assert size_of(Prompt(text=""), grammar) > 1000
    assert size_of(Prompt(token_ids=(1,) * 100)) == 400
