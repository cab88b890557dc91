"""Prepares requests on separate threads before an engine gets them.

Tokenising megabytes, compiling a schema and rendering a chat template can take seconds. Here they delay only requests
of the same kind, and the number of bytes that may wait is bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from attn_core.errors import DeadlineExceeded, OutOfCapacity
from attn_schema import Prompt, SamplingParams

from attn_engine.client import TextTask
from attn_engine.host.host import ModelHost

LARGE_BYTES = 32 * 1024
"""Requests of more bytes of prompts and grammars are prepared one at a time."""
GRAMMAR_COST = 32
"""The number of bytes whose tokenization takes about as long as compiling one byte of a grammar."""
MAX_WAITING_BYTES = 64 * 2**20
MAX_WAITING = 4096
"""The maximum bytes and number of requests that may wait to be prepared for one model; more are refused."""
LANES = {"text": 2, "chat": 2, "large": 1, "images": 1}
"""The number of threads for each kind of request. Chats have their own, as a template that loops runs for a second
until it is stopped."""


class Preparation:
    """Prepares the requests of one model. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes = {name: ThreadPoolExecutor(count, f"prepare {name}") for name, count in LANES.items()}
        self._waiting: dict[str, Future[Any]] = {}
        self._bytes = 0
        self._count = 0

    def submit(self, host: ModelHost, task: TextTask, start: Callable[[TextTask], None] | None = None) -> Future[None]:
        """Prepare a task and submit it to the engine by `start`, by default `host.submit`; the future gets its error.

        Waiting time counts against the deadline. A task that is cancelled while it waits is not started, and one that
        is cancelled while it starts is cancelled in the host.
        """
        began = time.monotonic()

        def begin() -> None:
            ready = task
            if task.timeout is not None:
                ready = replace(task, timeout=task.timeout - (time.monotonic() - began))
                if ready.timeout is not None and ready.timeout <= 0:
                    raise DeadlineExceeded("the deadline passed before the request was started")
            (start or host.submit)(ready)
            with self._lock:
                cancelled = self._waiting.get(task.id) is None
            if cancelled:
                host.cancel(task.id)

        return self._run(task.prompt, begin, task.id, task.params)

    def cancel(self, host: ModelHost, task_id: str) -> None:
        """Stop a task, whether it waits, is being prepared or runs."""
        with self._lock:
            waiting = self._waiting.pop(task_id, None)
        if waiting is not None:
            waiting.cancel()
        host.cancel(task_id)

    def tokenize(self, host: ModelHost, prompt: Prompt) -> Future[Any]:
        """Tokenize a prompt, in a future."""
        return self._run(prompt, partial(host.tokenize, prompt))

    def _run(
        self, prompt: Prompt, work: Callable[[], Any], name: str | None = None, params: object = None
    ) -> Future[Any]:
        images = [len(image) for image in prompt.images]
        size = size_of(prompt, params) + sum(images)
        lane = "images" if images else "large" if size > LARGE_BYTES else "text" if prompt.chat is None else "chat"
        with self._lock:
            if self._bytes + size > MAX_WAITING_BYTES or self._count >= MAX_WAITING:
                text = f"{self._count} requests of {self._bytes} bytes are already waiting to be prepared"
                raise OutOfCapacity(text, waiting=self._count, retry_seconds=1.0)
            self._bytes += size
            self._count += 1
            future = self._lanes[lane].submit(work)
            if name is not None:
                self._waiting[name] = future

        def done(_: Future[Any]) -> None:
            with self._lock:
                self._bytes -= size
                self._count -= 1
                if name is not None:
                    self._waiting.pop(name, None)

        future.add_done_callback(done)
        return future


def size_of(prompt: Prompt, params: object = None) -> int:
    """The amount of work to prepare a request without images, as an equivalent number of bytes of text."""
    size = len(prompt.text or "") + 4 * len(prompt.token_ids or ())
    size += sum(map(len, prompt.contents))
    if prompt.encoder_prompt is not None:
        size += len(prompt.encoder_prompt.text or "") + 4 * len(prompt.encoder_prompt.token_ids or ())
    if isinstance(params, SamplingParams) and params.structured_output is not None:
        size += GRAMMAR_COST * len(params.structured_output.grammar)
    return size
