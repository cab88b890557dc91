"""The asyncio interface of one model and its tasks, whether its engine runs in this process, a child or replicas."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from attn_core.errors import AttnError, Incompatible, Unavailable, cleaning_up
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    DeploymentConfig,
    Embeddings,
    EngineStats,
    ModelInfo,
    OutputDelta,
    Prompt,
    Resumption,
    SamplingParams,
    ScoringParams,
    SequenceScore,
    Token,
    Tokenization,
)
from attn_schema.resuming import StreamProgress, seeded

from attn_engine.request import RequestOutput

Answer = TypeVar("Answer")


def new_id() -> str:
    """A new, unique id for a task."""
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """A prompt to complete (`params` are `SamplingParams`) or to score (`params` are `ScoringParams`).

    `timeout` is the time left until the caller's deadline, in seconds. Requests of one `tenant` share a prefix cache
    and a weight in fair queueing. `adapter` is the name of a loaded adapter; the base model is used if it is empty.
    `resume` is the part of the outputs that has already been received from another host.
    """

    prompt: Prompt
    params: SamplingParams | ScoringParams
    timeout: float | None = None
    tenant: str = ""
    adapter: str = ""
    resume: Resumption | None = None
    id: str = field(default_factory=new_id)


@dataclass(frozen=True, kw_only=True)
class EmbedTask:
    """Texts to embed, or their token ids, cut to `max_tokens`; `timeout` is the time left until the caller's deadline,
    in seconds."""

    texts: tuple[str | tuple[int, ...], ...]
    timeout: float | None = None
    max_tokens: int | None = None
    id: str = field(default_factory=new_id)


Follow = Callable[[TextTask], AsyncGenerator[OutputDelta, None]]
"""Submits a task to an engine and yields its deltas; raises `EngineLost` if the engine is lost before the last."""


class EngineLost(Unavailable):
    """The engine that computed a request is gone or hands its requests over; another engine can continue them."""

    reason = "ENGINE_LOST"
    accepted = True
    """Whether the engine had accepted the request."""


class Streams:
    """The output queues of open tasks, by task id. Used from one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Queue[RequestOutput | AttnError]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Pass each output to its task; outputs of tasks that are no longer open are dropped."""
        for output in outputs:
            queue = self._open.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)

    def fail(self, error: AttnError, ids: Iterable[str] | None = None) -> None:
        """End the open tasks with these ids with `error`; all open tasks if `ids` is None."""
        for name in list(self._open) if ids is None else ids:
            if name in self._open:
                self._open[name].put_nowait(error)

    async def follow(
        self,
        task: TextTask,
        submit: Callable[[TextTask], Awaitable[None]],
        cancel: Callable[[str], Awaitable[None]],
    ) -> AsyncGenerator[OutputDelta, None]:
        """Submit a task and yield its deltas up to the last. Closing the iterator early cancels the task.

        Raises the error that ends the task.
        """
        queue: asyncio.Queue[RequestOutput | AttnError] = asyncio.Queue()
        self._open[task.id] = queue
        ended = False
        try:
            try:
                await submit(task)
            except EngineLost as lost:
                lost.accepted = False
                raise
            last = False
            while not last:
                output = await queue.get()
                if isinstance(output, AttnError):
                    raise output
                if output.error is not None:
                    raise output.error
                yield output.delta
                last = output.last
            ended = True
        except AttnError:
            ended = True
            raise
        finally:
            del self._open[task.id]
            if not ended:
                with cleaning_up("a task that nobody waits for"):
                    await asyncio.shield(cancel(task.id))


class EngineClient(ABC):
    """One model. All methods are called from one event loop and raise errors of `attn_core.errors`.

    Implementations start tasks by `submit` and pass all outputs to `streams`; `generate` and `score` are built on that.
    A task whose engine is lost continues on another engine, or on the same one after its restart.
    """

    scalable = False
    """Whether `scale` can change the number of engines."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.on_failure: Callable[[str], None] = lambda _: None
        """Called with the reason when the engine cannot be started again; it then accepts no more tasks."""
        self.on_unloaded: Callable[[], None] = lambda: None
        """Called when another gateway has unloaded the model: its engines are ending."""

    @abstractmethod
    async def start(self) -> ModelInfo:
        """Load the model; returns when it is ready for tasks."""

    @abstractmethod
    async def submit(self, task: TextTask) -> None:
        """Start a task, whose outputs go to `streams`; raises a `UserError` if it is refused, `EngineLost` if the
        engine is gone."""

    @abstractmethod
    async def cancel(self, task_id: str) -> None:
        """Stop a task; unknown ids are ignored, and so is an engine that is gone, as its tasks ended with it."""

    @abstractmethod
    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens that `generate` would process for a prompt."""

    @abstractmethod
    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, for tasks to use by this name, also on engines that start later."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter; running tasks go on."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """The current engine statistics, such as the running and waiting requests."""

    @abstractmethod
    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new tasks, let running ones finish for up to `shutdown_timeout` seconds, then free everything."""

    @property
    def replicas(self) -> int:
        """The number of engines that accept tasks now."""
        return 1

    async def pids(self) -> list[int]:
        """The ids of the processes of the engines that accept tasks, for monitoring."""
        return []

    async def scale(self, deployment: DeploymentConfig) -> None:
        """Change the number of engines; returns when the new number is deployed."""
        raise Incompatible("this model has one engine", replicas=deployment.replicas)

    async def sleep(self, shutdown_timeout: float) -> None:
        """Let running tasks finish for up to `shutdown_timeout` seconds, then free weights and KV cache."""
        raise Incompatible("only a model with one engine can sleep and get other weights", seconds=shutdown_timeout)

    async def wake_up(self) -> None:
        """Load the model again, with the weights that it had."""
        raise Incompatible("only a model with one engine can sleep and get other weights")

    async def update_weights(self, data: bytes, offset: int, shutdown_timeout: float, *, last: bool) -> None:  # noqa: ARG002 -- for those that can
        """Take a part of a safetensors file; after the last one its weights replace the model's, all or none.

        Tasks that begin later use them and no older KV cache; running ones may finish for up to `shutdown_timeout`
        seconds. Raises `InvalidValue` for a part that does not follow the one before, and `CheckpointInvalid` for other
        names, shapes or types than the model's.
        """
        raise Incompatible("only a model with one engine can sleep and get other weights", last=last, offset=offset)

    async def release(self, shutdown_timeout: float) -> None:
        """Like `stop`, but engines that other gateways use keep running."""
        await self.stop(shutdown_timeout)

    def generate(self, task: TextTask) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of a task; closing the iterator cancels it within one engine step."""
        return resumed(task, lambda part: self.streams.follow(part, self.submit, self.cancel))

    async def score(self, tasks: Sequence[TextTask]) -> list[SequenceScore]:
        """Log probabilities of given sequences; raises the first error. Cancelling it cancels the remaining tasks."""
        running = [asyncio.ensure_future(self._score(task)) for task in tasks]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for score in running:
                score.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def embed(self, task: EmbedTask) -> Embeddings:
        """A vector of norm 1 for each text; cancelling it ends the computation within one batch."""
        try:
            return await repeated(lambda: self._embed(task), task.timeout)
        except asyncio.CancelledError:
            with cleaning_up("a cancelled task"):
                await asyncio.shield(self.cancel(task.id))
            raise

    async def attention_maps(self, request: AttentionMapsRequest, adapter: str = "") -> list[AttentionMap]:
        """Attention weights, one map per layer, with the adapter if one is named."""
        return await repeated(lambda: self._attention_maps(request, adapter))

    @abstractmethod
    async def _embed(self, task: EmbedTask) -> Embeddings:
        """Like `embed`, once: raises `EngineLost` if the engine is lost."""

    @abstractmethod
    async def _attention_maps(self, request: AttentionMapsRequest, adapter: str) -> list[AttentionMap]:
        """Like `attention_maps`, once: raises `EngineLost` if the engine is lost."""

    async def _score(self, task: TextTask) -> SequenceScore:
        tokens: list[Token] = []
        async with aclosing(self.generate(task)) as deltas:
            async for delta in deltas:
                tokens += delta.tokens
        return SequenceScore(tokens=tuple(tokens), sum_logprob=sum(token.logprob or 0.0 for token in tokens))


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
