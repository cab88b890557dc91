"""A small real server behind the real gateway: it splits text into words, and its jobs are lists of events."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from attn_client import Client, ClientSettings
from attn_core import errors
from attn_gateway import GatewaySettings, handlers_of, page_of, serving
from attn_gateway.catalog import CatalogService
from attn_schema import (
    AttentionMap,
    Embeddings,
    EngineStats,
    FinishReason,
    JobEvent,
    JobState,
    ModelInfo,
    ModelState,
    OutputDelta,
    Prompt,
    SequenceScore,
    Tensor,
    Token,
    Tokenization,
    TopLogprob,
    TrainingConfig,
    TrainingJob,
    Usage,
)
from attn_schema import methods as rows
from attn_schema.training import JobError, Metrics


def tokens_of(prompt: Prompt) -> list[str]:
    if prompt.chat is not None:
        return [f"{turn.role}:{turn.content}" for turn in prompt.chat]
    if prompt.token_ids is not None:
        return [str(number) for number in prompt.token_ids]
    return (prompt.text or "").split()


class WordModel:
    """Continues a text with its own words; attends equally to all words before."""

    names = (rows.INFERENCE,)

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.freed = threading.Event()
        self.break_after: list[int] = []
        """Breaks the next streams after so many messages."""

    def handlers(self) -> Any:
        return handlers_of(rows.INFERENCE, self)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    def check(self, request: Any) -> list[str]:
        self.requests.append(request)
        if request.model != "words":
            raise errors.UnknownName.of("model", request.model, ["words"])
        return tokens_of(request.prompt) if hasattr(request, "prompt") else []

    async def generate(self, request: Any, _: Any) -> AsyncIterator[OutputDelta]:
        words = self.check(request)
        if len(words) > 5:
            raise errors.ContextLengthExceeded.of(len(words), 3, 8)
        left = self.break_after.pop(0) if self.break_after else None
        async with aclosing(self.deltas(request, words)) as deltas:
            async for delta in deltas:
                if left == 0:
                    raise errors.Unavailable("the stream is broken")
                left = None if left is None else left - 1
                yield delta

    async def deltas(self, request: Any, words: list[str]) -> AsyncIterator[OutputDelta]:
        parts = request.resume.received if request.resume else ()
        received = {part.index: len(part.token_ids) for part in parts}
        finished = [part.index for part in parts if part.finished]
        try:
            for choice in range(1, request.sampling.n):
                if choice in finished:
                    continue
                text = f"{choice}: {words[0]}"
                yield OutputDelta(text=text, index=choice, finish_reason=FinishReason.STOP, stop_reason="!")
            for number in range(received.get(0, 0), request.sampling.max_new_tokens or 10_000):
                text = words[number % len(words)]
                top = (TopLogprob(id=number, text=text, logprob=-0.5),)
                token = Token(id=number, text=text, logprob=-0.5, top_logprobs=top)
                yield OutputDelta(tokens=(token,), text=f"{text} ")
                await asyncio.sleep(0.002)
            usage = Usage(prompt_tokens=len(words), cached_tokens=1, completion_tokens=number + 1)
            yield OutputDelta(finish_reason=FinishReason.LENGTH, usage=usage)
        finally:
            self.freed.set()

    async def score(self, request: Any, _: Any) -> rows.ScoreResponse:
        scores = []
        for prompt in request.prompts:
            logprobs = [-float(number) if number else None for number in range(len(tokens_of(prompt)))]
            tokens = tuple(
                Token(id=number, text=text, logprob=logprob)
                for number, (text, logprob) in enumerate(zip(tokens_of(prompt), logprobs, strict=True))
            )
            scores.append(SequenceScore(tokens=tokens, sum_logprob=sum(logprob or 0.0 for logprob in logprobs)))
        return rows.ScoreResponse(scores=tuple(scores), usage=Usage())

    async def embed(self, request: Any, _: Any) -> Embeddings:
        self.check(request)
        data = b"".join(struct.pack("<2f", *(1, 0) if len(text) % 2 else (0.6, 0.8)) for text in request.texts)
        return Embeddings(embeddings=Tensor(shape=(len(request.texts), 2), data=data), usage=Usage())

    async def tokenize(self, request: Any, _: Any) -> Tokenization:
        words = self.check(request)
        tokens = tuple(Token(id=number, text=text) for number, text in enumerate(words))
        return Tokenization(tokens=tokens, text=" ".join(words))

    async def attention_maps(self, request: Any, _: Any) -> AsyncIterator[AttentionMap]:
        words = self.check(request)
        heads = request.heads or (0, 1, 2)
        weights = [[1 / (q + 1) if k <= q else 0.0 for k in range(len(words))] for q in range(len(words))]
        flat = [weight for _ in heads for row in weights for weight in row]
        tensor = Tensor(shape=(len(heads), len(words), len(words)), data=struct.pack(f"<{len(flat)}f", *flat))
        for layer in request.layers or (0, 1):
            yield AttentionMap(
                layer=layer,
                heads=heads,
                attention_weights=tensor,
                query_tokens=tuple(words),
                key_tokens=tuple(words),
                mechanism="mean",
            )

    async def get_engine_stats(self, *_: Any) -> EngineStats:
        return EngineStats(running=1, waiting=2, kv_tokens_used=3, kv_tokens_total=4)


class Shelf:
    """Models by name."""

    names = (rows.MODELS,)

    def __init__(self) -> None:
        self.models = {f"m{number:03}": ModelInfo(name=f"m{number:03}") for number in range(150)}

    def handlers(self) -> Any:
        return handlers_of(rows.MODELS, self)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    async def list_models(self, request: Any, _: Any) -> rows.ListModelsResponse:
        page, following = page_of(list(self.models.values()), request)
        return rows.ListModelsResponse(models=tuple(page), next_page_token=following)

    async def get_model(self, request: Any, _: Any) -> rows.GetModelResponse:
        known = {**self.models, "words": ModelInfo(name="words", chat=True)}
        if request.name not in known:
            raise errors.UnknownName.of("model", request.name, known)
        return rows.GetModelResponse(model=known[request.name])

    async def load_model(self, request: Any, _: Any) -> rows.LoadModelResponse:
        if request.name in self.models:
            raise errors.AlreadyExists(f"{request.name} is loaded from another source")
        self.models[request.name] = model = ModelInfo(
            name=request.name, source=request.source, state=ModelState.SERVING, dtype=request.engine.dtype
        )
        return rows.LoadModelResponse(model=model)

    async def unload_model(self, request: Any, _: Any) -> rows.UnloadModelResponse:
        del self.models[request.name]
        return rows.UnloadModelResponse()


class JobBook:
    """One job whose events come one by one; `cut_after` breaks the first watches after so many events."""

    names = (rows.TRAINING,)

    def __init__(self) -> None:
        self.config = TrainingConfig()
        self.watches: list[int] = []
        self.cut_after: list[int] = []
        self.state = JobState.SUCCEEDED
        self.steps = 12

    def handlers(self) -> Any:
        return handlers_of(rows.TRAINING, self)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    def job(self) -> TrainingJob:
        failed = JobError.of(errors.OutOfCapacity("the disk is full")) if self.state is JobState.FAILED else None
        metrics = {"loss": 1.5, "validation_loss": 1.25}
        return TrainingJob(
            id="job-1", state=self.state, step=self.steps, config=self.config, attempt=1, last_metrics=metrics,
            error=failed,
        )  # fmt: skip

    async def submit_training_job(self, request: Any, _: Any) -> rows.SubmitTrainingJobResponse:
        self.config = request.config
        return rows.SubmitTrainingJobResponse(job=self.job())

    async def get_training_job(self, *_: Any) -> rows.GetTrainingJobResponse:
        return rows.GetTrainingJobResponse(job=self.job())

    async def list_training_jobs(self, *_: Any) -> rows.ListTrainingJobsResponse:
        return rows.ListTrainingJobsResponse(jobs=(self.job(),))

    async def cancel_training_job(self, *_: Any) -> rows.CancelTrainingJobResponse:
        self.state = JobState.CANCELLED
        return rows.CancelTrainingJobResponse(job=self.job())

    async def resume_training_job(self, *_: Any) -> rows.ResumeTrainingJobResponse:
        raise errors.WrongState("job-1 is running")

    async def watch_training_job(self, request: Any, _: Any) -> AsyncIterator[rows.WatchTrainingJobResponse]:
        self.watches.append(request.after_event_id)
        cut = self.cut_after.pop(0) if self.cut_after else None
        yield rows.WatchTrainingJobResponse(job=self.job())
        for sent, event in enumerate(range(request.after_event_id + 1, self.steps + 1)):
            if sent == cut:
                raise errors.Unavailable("the server is shutting down")
            yield rows.WatchTrainingJobResponse(heartbeat=rows.Heartbeat(last_event_id=event))
            metrics = Metrics(step=event, values={"loss": 1 / event})
            yield rows.WatchTrainingJobResponse(event=JobEvent(id=event, attempt=1, metrics=metrics))


class Running:
    """The gateway in a loop of its own thread, so that a blocking client can be tested against it."""

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        self.words, self.shelf, self.book = WordModel(), Shelf(), JobBook()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.context: Any = None
        self.address = self.open(settings)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=60)

    def open(self, settings: GatewaySettings | None = None) -> str:
        self.context = serving([self.words, self.shelf, self.book, CatalogService()], settings, shutdown_timeout=0.2)
        return str(self.run(self.context.__aenter__()).address)

    def shut(self) -> None:
        self.run(self.context.__aexit__(None, None, None))

    def end(self) -> None:
        self.shut()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def start_one(settings: GatewaySettings | None = None) -> Running:
            running = Running(settings)
            stack.callback(running.end)
            return running

        yield start_one


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    return start()


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(ClientSettings(address=server.address, timeout=60)) as opened:
        yield opened
