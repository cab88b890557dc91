"""What the servicers ask of a model, wherever its host is."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from attn_host import EmbedTask, TextTask
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    DeploymentConfig,
    Embeddings,
    EngineStats,
    ModelInfo,
    OutputDelta,
    Prompt,
    SequenceScore,
    Token,
    Tokenization,
)

from attn_serve.refusals import RecentRefusals
from attn_serve.resuming import repeated, resumed
from attn_serve.streams import Streams


class Backend(Protocol):
    """Where the host of a model is: in this process or in an actor. Errors are those of `attn_core.errors`."""

    async def start(self, streams: Streams) -> ModelInfo:
        """Load the model and deliver its outputs to `streams` from now on."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """The answer of a method of `attn_host.ModelHost`."""
        ...

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new tasks, let running ones finish for up to `shutdown_timeout` seconds, then free everything."""
        ...


class Scalable(Protocol):
    """A backend with several engines."""

    @property
    def replicas(self) -> int:
        """Engines that take tasks."""
        ...

    async def scale(self, deployment: DeploymentConfig) -> None:
        """Change how many there are; returns when there are as many."""
        ...


class EngineClient:
    """One model behind asyncio calls. Errors are those of `attn_core.errors`."""

    adapter = ""
    """The adapter that calls name; none."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.refusals = RecentRefusals()
        self._streams = Streams()

    async def start(self) -> ModelInfo:
        """Load the model; returns when it can answer."""
        return await self.backend.start(self._streams)

    def generate(self, task: TextTask) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of a task; closing the iterator cancels it within one engine step.

        Where its engine is lost, the task goes on at another one, or at the same once that is back.
        """
        return resumed(task, lambda part: self._streams.follow(part, self._submit, self._cancel))

    async def score(self, tasks: Sequence[TextTask]) -> list[SequenceScore]:
        """Log probabilities of given sequences; raises the first error. Being cancelled cancels all that are left."""
        running = [asyncio.ensure_future(self._score(task)) for task in tasks]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for score in running:
                score.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens that `generate` would read."""
        return cast("Tokenization", await self.backend.call("tokenize", prompt))

    async def embed(self, task: EmbedTask) -> Embeddings:
        """A vector of length 1 for each text; being cancelled ends it within one batch."""
        try:
            return cast("Embeddings", await repeated(partial(self.backend.call, "embed", task), task.timeout))
        except asyncio.CancelledError:
            await asyncio.shield(self._cancel(task.id))
            raise

    async def load_adapter(self, name: str, folder: Path) -> AdapterClient:
        """Load an adapter on the model; the model with it, as another model that shares the engine."""
        await self.backend.call("load_adapter", name, folder)
        return AdapterClient(self, name)

    async def attention_maps(self, request: AttentionMapsRequest) -> list[AttentionMap]:
        """Attention weights, one map a layer."""
        call = partial(self.backend.call, "attention_maps", request, self.adapter)
        return cast("list[AttentionMap]", await repeated(call))

    async def stats(self) -> EngineStats:
        """How busy the model is."""
        return cast("EngineStats", await self.backend.call("stats"))

    @property
    def open_requests(self) -> int:
        """Requests whose outputs somebody waits for."""
        return len(self._streams)

    @property
    def replicas(self) -> int:
        """Engines that answer now."""
        return getattr(self.backend, "replicas", 1)

    async def scale(self, deployment: DeploymentConfig) -> bool:
        """Change how many engines there are; False where the backend has one and no more."""
        if not hasattr(self.backend, "scale"):
            return False
        await cast("Scalable", self.backend).scale(deployment)
        return True

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new tasks, let running ones finish for up to `shutdown_timeout` seconds, then free everything."""
        await self.backend.stop(shutdown_timeout)

    async def release(self, shutdown_timeout: float) -> None:
        """As `stop`, but engines that other gateways use go on."""
        await getattr(self.backend, "release", self.backend.stop)(shutdown_timeout)

    async def leave(self, shutdown_timeout: float) -> None:
        """As `stop`, but the engines are not this gateway's to end: another one did, or serves with them."""
        await getattr(self.backend, "leave", self.backend.stop)(shutdown_timeout)

    def adopt(self, deployment: DeploymentConfig) -> None:
        """Take note that another gateway has changed how many engines there are."""
        if hasattr(self.backend, "adopt"):
            self.backend.adopt(deployment)

    async def _score(self, task: TextTask) -> SequenceScore:
        tokens: list[Token] = []
        async with aclosing(self.generate(task)) as deltas:
            async for delta in deltas:
                tokens += delta.tokens
        return SequenceScore(tokens=tuple(tokens), sum_logprob=sum(token.logprob or 0.0 for token in tokens))

    async def _submit(self, task: TextTask) -> None:
        await self.backend.call("submit", task)

    async def _cancel(self, task_id: str) -> None:
        await self.backend.call("cancel", task_id)


class AdapterClient(EngineClient):
    """A model with an adapter on it: calls go to the engine of the model, and name the adapter."""

    def __init__(self, base: EngineClient, adapter: str) -> None:
        self.backend = base.backend
        self.adapter = adapter
        self.refusals = base.refusals
        self._streams = base._streams  # noqa: SLF001 -- one engine has one stream of outputs

    async def stop(self, shutdown_timeout: float) -> None:  # noqa: ARG002 -- requests that run go on
        """Unload the adapter; the model stays."""
        await self.backend.call("unload_adapter", self.adapter)

    async def leave(self, shutdown_timeout: float) -> None:  # noqa: ARG002 -- requests that run go on
        """Forget the adapter, which another gateway has unloaded."""
        if hasattr(self.backend, "forget_adapter"):
            self.backend.forget_adapter(self.adapter)

    async def scale(self, deployment: DeploymentConfig) -> bool:  # noqa: ARG002
        """False, as the engines are those of the model."""
        return False

    async def _submit(self, task: TextTask) -> None:
        await super()._submit(dataclasses.replace(task, adapter=self.adapter))
