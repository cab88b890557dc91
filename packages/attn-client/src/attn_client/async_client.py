# ruff: noqa: ASYNC109 - gRPC sends the timeout to the server, as the deadline
"""The asyncio client, with the same calls as `Client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType

from attn_core.errors import AttnError, Unavailable
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    ChatMessage,
    Completion,
    DeploymentConfig,
    EngineConfig,
    EngineStats,
    Mechanism,
    ModelInfo,
    OutputDelta,
    Prompt,
    PromptLike,
    SamplingParams,
    SequenceScore,
    Tokenization,
    TokenizeRequest,
)
from attn_schema import methods as rows
from attn_schema.estimate import JobEstimate
from attn_schema.training import JobEvent, TrainingConfig, TrainingJob

from attn_client.async_connection import AsyncConnection
from attn_client.requests import embed_request, load_request, score_request, vectors
from attn_client.resuming import GenerateState, WatchState
from attn_client.settings import ClientSettings


class AsyncClient:
    """A connection to one server. Use it in an `async with` block, or await `close`.

    Every call takes `timeout` in seconds and raises the errors of `attn_core.errors`: those that the server reports,
    `Unavailable` if no server answers, and `DeadlineExceeded` after the timeout.
    """

    def __init__(self, settings: ClientSettings | None = None) -> None:
        self._connection = AsyncConnection(settings or ClientSettings())
        self.models = AsyncModels(self._connection)
        self.mechanisms = AsyncMechanisms(self._connection)
        self.jobs = AsyncJobs(self._connection)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._connection.close()

    def generate(
        self, model: str, prompt: PromptLike, sampling: SamplingParams | None = None, *, timeout: float | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the completion of a prompt as deltas; closing the iterator cancels the request on the server.

        A broken stream is resumed where it stopped, with the same tokens, at any of the server's addresses.
        """
        return self._generate(GenerateState(self._connection.settings, model, prompt, sampling, timeout))

    async def _generate(self, state: GenerateState) -> AsyncGenerator[OutputDelta, None]:
        while True:
            try:
                async with aclosing(
                    self._connection.stream(rows.GENERATE, state.request(), state.remaining())
                ) as deltas:
                    async for delta in deltas:
                        yield state.take(delta)
                return
            except Unavailable as error:
                await asyncio.sleep(state.wait_after(error))

    async def complete(
        self, model: str, prompt: PromptLike, sampling: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Completion:
        """The whole completion of a prompt."""
        return Completion.of([delta async for delta in self.generate(model, prompt, sampling, timeout=timeout)])

    async def complete_all(
        self, model: str, prompt: PromptLike, sampling: SamplingParams, *, timeout: float | None = None
    ) -> list[Completion]:
        """All `sampling.n` completions of a prompt."""
        return Completion.all_of([delta async for delta in self.generate(model, prompt, sampling, timeout=timeout)])

    def chat(
        self,
        model: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the model's reply to a conversation as deltas, using the model's chat template."""
        return self.generate(model, messages, sampling, timeout=timeout)

    async def score(
        self, model: str, prompts: Sequence[PromptLike], *, top_logprobs: int = 0, timeout: float | None = None
    ) -> list[SequenceScore]:
        """The log probabilities of the tokens of each sequence."""
        answer = await self._connection.unary(rows.SCORE, score_request(model, prompts, top_logprobs), timeout)
        return list(answer.scores)

    async def embed(self, model: str, texts: Sequence[str], *, timeout: float | None = None) -> list[tuple[float, ...]]:
        """A vector of length 1 for each text, from an encoder; similar texts have a high cosine similarity."""
        return vectors(texts, await self._connection.unary(rows.EMBED, embed_request(model, texts), timeout))

    async def tokenize(self, model: str, prompt: PromptLike, *, timeout: float | None = None) -> Tokenization:
        """Tokenise a prompt as the model would read it."""
        request = TokenizeRequest(model=model, prompt=Prompt.of(prompt))
        return await self._connection.unary(rows.TOKENIZE, request, timeout)

    async def attention_maps(
        self,
        model: str,
        prompt: PromptLike,
        *,
        layers: Sequence[int] = (),
        heads: Sequence[int] = (),
        gradients: bool = False,
        timeout: float | None = None,
    ) -> list[AttentionMap]:
        """The attention weights of a prompt, one map for each layer; without `layers` or `heads`, all of them.

        With `gradients` the first map has `input_gradients`, a measure of how much the next token depends on each
        token, or `gradients_note`, the reason why there are none.
        """
        request = AttentionMapsRequest(
            model=model, prompt=Prompt.of(prompt), layers=tuple(layers), heads=tuple(heads), gradients=gradients
        )
        return [layer async for layer in self._connection.stream(rows.ATTENTION_MAPS, request, timeout)]

    async def model_info(self, model: str, *, timeout: float | None = None) -> ModelInfo:
        """The description of one model; raises `UnknownName`."""
        return await self.models.get(model, timeout=timeout)

    async def engine_stats(self, model: str, *, timeout: float | None = None) -> EngineStats:
        """The load and the counters of a model's engine."""
        return await self._connection.unary(rows.GET_ENGINE_STATS, rows.GetEngineStatsRequest(model=model), timeout)


class AsyncModels:
    """Calls that list, load, scale and unload the models of the server."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def list(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """All models, sorted by name."""
        pages = await self._connection.pages(rows.LIST_MODELS, timeout)
        return [model for page in pages for model in page.models]

    async def get(self, name: str, *, timeout: float | None = None) -> ModelInfo:
        """The model of this name."""
        return (await self._connection.unary(rows.GET_MODEL, rows.GetModelRequest(name=name), timeout)).model

    async def load(
        self,
        name: str,
        source: str = "",
        *,
        engine: EngineConfig | None = None,
        base_model: str = "",
        deployment: DeploymentConfig | None = None,
        timeout: float | None = None,
    ) -> ModelInfo:
        """Load a model from a folder on the server, a registered name or a finished job; returns once it is serving.

        A LoRA adapter is loaded on `base_model`, by default the loaded model that it was trained for.
        """
        request = load_request(name, source, engine, deployment, base_model)
        return (await self._connection.unary(rows.LOAD_MODEL, request, timeout)).model

    async def scale(self, name: str, deployment: DeploymentConfig, *, timeout: float | None = None) -> ModelInfo:
        """Change a model's number of engines, without interrupting requests; returns once that many are running."""
        request = rows.ScaleModelRequest(name=name, deployment=deployment)
        return (await self._connection.unary(rows.SCALE_MODEL, request, timeout)).model

    async def sleep(
        self, name: str, *, shutdown_timeout: float | None = None, timeout: float | None = None
    ) -> ModelInfo:
        """Free a model's memory until `wake_up`, after its running requests have ended or `shutdown_timeout` seconds
        have passed; for admins."""
        request = rows.SleepRequest(name=name, shutdown_timeout=shutdown_timeout)
        return (await self._connection.unary(rows.SLEEP, request, timeout)).model

    async def wake_up(self, name: str, *, timeout: float | None = None) -> ModelInfo:
        """Load a sleeping model again, with the weights that it had; for admins."""
        return (await self._connection.unary(rows.WAKE_UP, rows.WakeUpRequest(name=name), timeout)).model

    async def update_weights(
        self,
        name: str,
        data: bytes | memoryview,
        *,
        shutdown_timeout: float | None = None,
        timeout: float | None = None,
    ) -> ModelInfo:
        """Replace a model's weights by those of a safetensors file, all or none; for admins.

        `data` is the file, which is sent in parts; its weights have the names and shapes of those in the model's
        folder. Requests that run may finish with the old weights for `shutdown_timeout` seconds, 0 aborts them.
        """
        whole, model = memoryview(data), ModelInfo()
        for offset in range(0, max(1, len(whole)), rows.PART_BYTES):
            request = rows.UpdateWeightsRequest(
                name=name,
                data=bytes(whole[offset : offset + rows.PART_BYTES]),
                offset=offset,
                last=offset + rows.PART_BYTES >= len(whole),
                shutdown_timeout=shutdown_timeout,
            )
            model = (await self._connection.unary(rows.UPDATE_WEIGHTS, request, timeout)).model
        return model

    async def unload(self, name: str, *, shutdown_timeout: float | None = None, timeout: float | None = None) -> None:
        """Unload a model, after its running requests have ended or `shutdown_timeout` seconds have passed."""
        request = rows.UnloadModelRequest(name=name, shutdown_timeout=shutdown_timeout)
        await self._connection.unary(rows.UNLOAD_MODEL, request, timeout)


class AsyncMechanisms:
    """The mechanisms installed on the server."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def list(self, *, timeout: float | None = None) -> list[Mechanism]:
        """All mechanisms, sorted by name."""
        pages = await self._connection.pages(rows.LIST_MECHANISMS, timeout)
        return [mechanism for page in pages for mechanism in page.mechanisms]

    async def get(self, name: str, *, timeout: float | None = None) -> Mechanism:
        """The mechanism of this name, or of the full name "distribution/name"."""
        request = rows.GetMechanismRequest(name=name)
        return (await self._connection.unary(rows.GET_MECHANISM, request, timeout)).mechanism


class AsyncJobs:
    """The training jobs of the server."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def submit(
        self,
        config: TrainingConfig,
        *,
        job_id: str = "",
        validate_only: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> TrainingJob:
        """Submit a training job. Repeated with the same `job_id` and configuration, returns the existing job.

        Jobs of a higher `priority` start first and preempt running jobs of a lower one, which continue later.
        """
        request = rows.SubmitTrainingJobRequest(
            config=config, job_id=job_id, validate_only=validate_only, priority=priority
        )
        repeatable = bool(job_id) or validate_only
        answer = await self._connection.unary(rows.SUBMIT_TRAINING_JOB, request, timeout, repeatable=repeatable)
        return answer.job

    async def estimate(self, config: TrainingConfig, *, job_id: str = "", timeout: float | None = None) -> JobEstimate:
        """Estimate the cost of a job: validates it as `submit` does, and times a few steps on the server's machine."""
        request = rows.EstimateTrainingJobRequest(config=config, job_id=job_id)
        return (await self._connection.unary(rows.ESTIMATE_TRAINING_JOB, request, timeout)).estimate

    async def get(self, job_id: str, *, timeout: float | None = None) -> TrainingJob:
        """The job of this id."""
        request = rows.GetTrainingJobRequest(id=job_id)
        return (await self._connection.unary(rows.GET_TRAINING_JOB, request, timeout)).job

    async def list(self, *, timeout: float | None = None) -> list[TrainingJob]:
        """All jobs, newest first."""
        pages = await self._connection.pages(rows.LIST_TRAINING_JOBS, timeout)
        return [job for page in pages for job in page.jobs]

    async def watch(
        self, job_id: str, *, after: int = 0, patience: float = 60.0
    ) -> AsyncGenerator[TrainingJob | JobEvent, None]:
        """Yield the job's current record, then each event with an id above `after`, until the job has ended.

        Reconnects after a broken connection, for up to `patience` seconds, without losing or repeating an event.
        """
        state = WatchState(job_id, after=after, patience=patience)
        while True:
            try:
                async with aclosing(self._connection.stream(rows.WATCH_TRAINING_JOB, state.request(), None)) as updates:
                    async for update in updates:
                        fresh = state.accept(update)
                        if fresh is not None:
                            yield fresh
                return
            except AttnError as error:
                await asyncio.sleep(state.wait_after(error))

    async def cancel(self, job_id: str, *, discard: bool = False, timeout: float | None = None) -> TrainingJob:
        """Ask a job to stop; it writes a last checkpoint first unless `discard`."""
        request = rows.CancelTrainingJobRequest(id=job_id, discard=discard)
        return (await self._connection.unary(rows.CANCEL_TRAINING_JOB, request, timeout)).job

    async def resume(self, job_id: str, *, timeout: float | None = None) -> TrainingJob:
        """Restart a failed or cancelled job from its newest checkpoint."""
        request = rows.ResumeTrainingJobRequest(id=job_id)
        return (await self._connection.unary(rows.RESUME_TRAINING_JOB, request, timeout)).job

    async def delete(self, job_id: str, *, cancel: bool = False, timeout: float | None = None) -> str:
        """Delete the record and files of a job that has ended; with `cancel`, a running job is cancelled first.

        Returns the folder of its trained model, which is kept; an empty string if there is none.
        """
        request = rows.DeleteTrainingJobRequest(id=job_id, cancel=cancel)
        return (await self._connection.unary(rows.DELETE_TRAINING_JOB, request, timeout)).kept_model_path
