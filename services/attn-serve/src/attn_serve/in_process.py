"""A backend that runs the host in this process, for tests, notebooks and use without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from attn_core.errors import Unavailable
from attn_engine import RequestOutput
from attn_engine.host import ModelHost, Preparation, open_host
from attn_schema import EngineConfig, ModelInfo

from attn_serve.streams import Streams

IN_THREAD = frozenset({"attention_maps", "load_adapter"})
"""Long-running methods, which are called in a thread so that they do not block the event loop."""
PREPARATIONS: WeakKeyDictionary[ModelHost, Preparation] = WeakKeyDictionary()
"""The `Preparation` of each host, which turns prompts into requests."""


async def call_host(host: ModelHost, method: str, *arguments: Any) -> Any:
    """Call a method of a host and return its result, without blocking the event loop for long."""
    if method in IN_THREAD:
        return await asyncio.to_thread(getattr(host, method), *arguments)
    preparation = PREPARATIONS.get(host) or PREPARATIONS.setdefault(host, Preparation())
    match method, arguments:
        case "submit", (task,):
            answer: Any = preparation.submit(host, task)
        case "submit", (task, state):
            answer = preparation.submit(host, task, lambda ready: host.submit(ready, state))
        case "prefill", (task,):
            answer = preparation.submit(host, task, host.prefill)
        case "tokenize", (prompt,):
            answer = preparation.tokenize(host, prompt)
        case "cancel", (task_id,):
            preparation.cancel(host, task_id)
            return None
        case _:
            answer = getattr(host, method)(*arguments)
    return await asyncio.wrap_future(answer) if isinstance(answer, Future) else answer


class InProcessBackend:
    """Runs the host on threads of this process."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self._folder = folder
        self._config = config
        self.host: ModelHost | None = None

    async def start(self, streams: Streams) -> ModelInfo:
        """Load the model and deliver its outputs to `streams` from now on."""
        loop = asyncio.get_running_loop()

        def deliver(outputs: Sequence[RequestOutput]) -> None:
            loop.call_soon_threadsafe(streams.deliver, outputs)

        self.host = await asyncio.to_thread(open_host, self._folder, self._config, deliver)
        return self.host.info

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host and return its result."""
        if self.host is None:
            if method == "cancel":
                return None
            raise Unavailable("the engine is not running")
        return await call_host(self.host, method, *arguments)

    async def stop(self, shutdown_timeout: float) -> None:
        """Let running tasks finish, then free everything."""
        if self.host is not None:
            host, self.host = self.host, None
            await asyncio.to_thread(host.stop, shutdown_timeout)
