"""The client through which the handlers call a model, whether its host is in this process or in actors."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from attn_core.errors import cleaning_up
from attn_engine.host import EmbedTask, TextTask
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
    """Runs the host of a model in this process or in actors. Raises errors of `attn_core.errors`."""

    async def start(self, streams: Streams) -> ModelInfo:
        """Load the model and deliver its outputs to `streams` from now on."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `attn_engine.host.ModelHost` and return its result."""
        ...

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new tasks, let running ones finish for up to `shutdown_timeout` seconds, then free everything."""
        ...


class Scalable(Protocol):
    """A backend with several engines."""

    @property
    def replicas(self) -> int:
        """The number of engines that accept tasks."""
        ...

    async def scale(self, deployment: DeploymentConfig) -> None:
        """Change the number of engines; returns when the new number is deployed."""
        ...


class EngineClient:
    """The asyncio interface of one model. Raises errors of `attn_core.errors`."""

    adapter = ""
    """The name of the adapter that calls use; empty for none."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.refusals = RecentRefusals()
        self._streams = Streams()

    async def start(self) -> ModelInfo:
        """Load the model; returns when it is ready for requests."""
        return await self.backend.start(self._streams)

    def generate(self, task: TextTask) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of a task; closing the iterator cancels it within one engine step.

        If its engine is lost, the task continues on another engine, or on the same one after its restart.
        """
        return resumed(task, lambda part: self._streams.follow(part, self._submit, self._cancel))

    async def score(self, tasks: Sequence[TextTask]) -> list[SequenceScore]:
        """Log probabilities of given sequences; raises the first error. Cancelling it cancels the remaining tasks."""
        running = [asyncio.ensure_future(self._score(task)) for task in tasks]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for score in running:
                score.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens that `generate` would process for a prompt."""
        return cast("Tokenization", await self.backend.call("tokenize", prompt))

    async def embed(self, task: EmbedTask) -> Embeddings:
        """A vector of norm 1 for each text; cancelling it ends the computation within one batch."""
        try:
            return cast("Embeddings", await repeated(partial(self.backend.call, "embed", task), task.timeout))
        except asyncio.CancelledError:
            with cleaning_up("a cancelled task"):
                await asyncio.shield(self._cancel(task.id))
            raise

    async def load_adapter(self, name: str, folder: Path) -> AdapterClient:
        """Load an adapter on the model; returns a client of the adapted model, which shares the engine."""
        await self.backend.call("load_adapter", name, folder)
        return AdapterClient(self, name)

    async def attention_maps(self, request: AttentionMapsRequest) -> list[AttentionMap]:
        """Attention weights, one map per layer."""
        call = partial(self.backend.call, "attention_maps", request, self.adapter)
        return cast("list[AttentionMap]", await repeated(call))

    async def stats(self) -> EngineStats:
        """The current engine statistics of the model, such as its running and waiting requests."""
        return cast("EngineStats", await self.backend.call("stats"))

    @property
    def open_requests(self) -> int:
        """The number of requests whose outputs are still awaited."""
        return len(self._streams)

    @property
    def replicas(self) -> int:
        """The number of engines that accept tasks now."""
        return getattr(self.backend, "replicas", 1)

    async def scale(self, deployment: DeploymentConfig) -> bool:
        """Change the number of engines; returns False if the backend can have only one."""
        if not hasattr(self.backend, "scale"):
            return False
        await cast("Scalable", self.backend).scale(deployment)
        return True

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new tasks, let running ones finish for up to `shutdown_timeout` seconds, then free everything."""
        await self.backend.stop(shutdown_timeout)

    async def release(self, shutdown_timeout: float) -> None:
        """Like `stop`, but engines that other gateways use keep running."""
        await getattr(self.backend, "release", self.backend.stop)(shutdown_timeout)

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
    """A model with an adapter: calls use the engine of the base model and name the adapter."""

    def __init__(self, base: EngineClient, adapter: str) -> None:
        self.backend = base.backend
        self.adapter = adapter
        self.refusals = base.refusals
        self._streams = base._streams  # noqa: SLF001 -- one engine has one stream of outputs

    async def stop(self, shutdown_timeout: float) -> None:  # noqa: ARG002 -- requests that run go on
        """Unload the adapter; the model stays."""
        await self.backend.call("unload_adapter", self.adapter)

    async def scale(self, deployment: DeploymentConfig) -> bool:  # noqa: ARG002
        """Return False: the engines belong to the base model."""
        return False

    async def _submit(self, task: TextTask) -> None:
        await super()._submit(dataclasses.replace(task, adapter=self.adapter))
