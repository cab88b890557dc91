"""A small real server behind the real gateway: it splits text into words, and its jobs are lists of events."""

# ruff: noqa: N802 - the names of calls are the interface's
from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import grpc.aio
import pytest
from attn.v1 import common_pb2, inference_pb2, model_pb2, training_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from attn.v1.model_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from attn.v1.training_pb2_grpc import TrainingServiceServicer, add_TrainingServiceServicer_to_server
from attn_client import Client, ClientSettings
from attn_core import errors
from attn_gateway import GatewaySettings, page_of, serving
from attn_gateway.catalog import CatalogGrpc
from attn_schema.codec import to_message
from attn_schema.training import JobError


def tokens_of(prompt: common_pb2.Prompt) -> list[str]:
    kind = prompt.WhichOneof("kind")
    if kind == "chat":
        return [f"{turn.role}:{turn.content}" for turn in prompt.chat.messages]
    if kind == "token_ids":
        return [str(number) for number in prompt.token_ids.ids]
    return prompt.text.split()


class WordModel(InferenceServiceServicer):
    """Continues a text with its own words; attends equally to all words before."""

    names = ("attn.v1.InferenceService",)

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.freed = threading.Event()
        self.break_after: list[int] = []
        """Breaks the next streams after so many messages."""

    def add_to(self, server: grpc.aio.Server) -> None:
        add_InferenceServiceServicer_to_server(self, server)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    def check(self, request: Any) -> list[str]:
        self.requests.append(request)
        if request.model != "words":
            raise errors.UnknownName.of("model", request.model, ["words"])
        return tokens_of(request.prompt) if hasattr(request, "prompt") else []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        words = self.check(request)
        if len(words) > 5:
            raise errors.ContextLengthExceeded.of(len(words), 3, 8)
        left = self.break_after.pop(0) if self.break_after else None
        async with aclosing(self.messages(request, words)) as messages:
            async for message in messages:
                if left == 0:
                    raise errors.Unavailable("the stream is broken")
                left = None if left is None else left - 1
                yield message

    async def messages(self, request: Any, words: list[str]) -> AsyncIterator[inference_pb2.GenerateResponse]:
        received = {part.index: len(part.token_ids) for part in request.resume.received}
        finished = [part.index for part in request.resume.received if part.finished]
        try:
            for choice in range(1, request.sampling.n):
                if choice in finished:
                    continue
                text = f"{choice}: {words[0]}"
                reason = inference_pb2.FINISH_REASON_STOP
                yield inference_pb2.GenerateResponse(text=text, index=choice, finish_reason=reason, stop_reason="!")
            for number in range(received.get(0, 0), request.sampling.max_new_tokens or 10_000):
                text = words[number % len(words)]
                token = common_pb2.Token(id=number, text=text, logprob=-0.5)
                token.top_logprobs.add(id=number, text=text, logprob=-0.5)
                yield inference_pb2.GenerateResponse(tokens=[token], text=f"{text} ")
                await asyncio.sleep(0.002)
            usage = common_pb2.Usage(prompt_tokens=len(words), cached_tokens=1, completion_tokens=number + 1)
            yield inference_pb2.GenerateResponse(finish_reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)
        finally:
            self.freed.set()

    async def Score(self, request: Any, context: Any) -> inference_pb2.ScoreResponse:
        response = inference_pb2.ScoreResponse()
        for prompt in request.prompts:
            score = response.scores.add()
            for number, text in enumerate(tokens_of(prompt)):
                logprob = -float(number) if number else None
                score.tokens.add(id=number, text=text, logprob=logprob)
                score.sum_logprob += logprob or 0.0
        return response

    async def Embed(self, request: Any, context: Any) -> inference_pb2.EmbedResponse:
        self.check(request)
        data = b"".join(struct.pack("<2f", *(1, 0) if len(text) % 2 else (0.6, 0.8)) for text in request.texts)
        shape = [len(request.texts), 2]
        tensor = common_pb2.Tensor(element_type=common_pb2.ELEMENT_TYPE_FLOAT32, shape=shape, data=data)
        return inference_pb2.EmbedResponse(embeddings=tensor, usage=common_pb2.Usage())

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        words = self.check(request)
        tokens = [common_pb2.Token(id=number, text=text) for number, text in enumerate(words)]
        return inference_pb2.TokenizeResponse(tokens=tokens, text=" ".join(words))

    async def AttentionMaps(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.AttentionMapsResponse]:
        words = self.check(request)
        heads = list(request.heads) or [0, 1, 2]
        rows = [[1 / (q + 1) if k <= q else 0.0 for k in range(len(words))] for q in range(len(words))]
        flat = [weight for _ in heads for row in rows for weight in row]
        shape = [len(heads), len(words), len(words)]
        data = struct.pack(f"<{len(flat)}f", *flat)
        tensor = common_pb2.Tensor(element_type=common_pb2.ELEMENT_TYPE_FLOAT32, shape=shape, data=data)
        for layer in request.layers or [0, 1]:
            yield inference_pb2.AttentionMapsResponse(
                layer=layer,
                heads=heads,
                attention_weights=tensor,
                query_tokens=words,
                key_tokens=words,
                mechanism="mean",
            )

    async def GetEngineStats(self, request: Any, context: Any) -> inference_pb2.GetEngineStatsResponse:
        return inference_pb2.GetEngineStatsResponse(running=1, waiting=2, kv_tokens_used=3, kv_tokens_total=4)


class Shelf(ModelServiceServicer):
    """Models by name."""

    names = ("attn.v1.ModelService",)

    def __init__(self) -> None:
        self.models = {f"m{number:03}": model_pb2.ModelInfo(name=f"m{number:03}") for number in range(150)}

    def add_to(self, server: grpc.aio.Server) -> None:
        add_ModelServiceServicer_to_server(self, server)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    async def ListModels(self, request: Any, context: Any) -> model_pb2.ListModelsResponse:
        page, following = page_of(list(self.models.values()), request)
        return model_pb2.ListModelsResponse(models=page, next_page_token=following)

    async def LoadModel(self, request: Any, context: Any) -> model_pb2.LoadModelResponse:
        if request.name in self.models:
            raise errors.AlreadyExists(f"{request.name} is loaded from another source")
        model = model_pb2.ModelInfo(name=request.name, source=request.source, state=model_pb2.MODEL_STATE_SERVING)
        model.dtype = request.engine.dtype
        self.models[request.name] = model
        return model_pb2.LoadModelResponse(model=model)

    async def UnloadModel(self, request: Any, context: Any) -> model_pb2.UnloadModelResponse:
        del self.models[request.name]
        return model_pb2.UnloadModelResponse()


class JobBook(TrainingServiceServicer):
    """One job whose events come one by one; `cut_after` breaks the first watches after so many events."""

    names = ("attn.v1.TrainingService",)

    def __init__(self) -> None:
        self.config: training_pb2.TrainingConfig | None = None
        self.watches: list[int] = []
        self.cut_after: list[int] = []
        self.state = training_pb2.JOB_STATE_SUCCEEDED
        self.steps = 12

    def add_to(self, server: grpc.aio.Server) -> None:
        add_TrainingServiceServicer_to_server(self, server)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    def job(self) -> training_pb2.TrainingJob:
        job = training_pb2.TrainingJob(id="job-1", state=self.state, step=self.steps, config=self.config, attempt=1)
        job.last_metrics["loss"] = 1.5
        job.last_metrics["validation_loss"] = 1.25
        if self.state == training_pb2.JOB_STATE_FAILED:
            job.error.CopyFrom(to_message(JobError.of(errors.OutOfCapacity("the disk is full"))))
        return job

    async def SubmitTrainingJob(self, request: Any, context: Any) -> training_pb2.SubmitTrainingJobResponse:
        self.config = request.config
        return training_pb2.SubmitTrainingJobResponse(job=self.job())

    async def GetTrainingJob(self, request: Any, context: Any) -> training_pb2.GetTrainingJobResponse:
        return training_pb2.GetTrainingJobResponse(job=self.job())

    async def ListTrainingJobs(self, request: Any, context: Any) -> training_pb2.ListTrainingJobsResponse:
        return training_pb2.ListTrainingJobsResponse(jobs=[self.job()])

    async def CancelTrainingJob(self, request: Any, context: Any) -> training_pb2.CancelTrainingJobResponse:
        self.state = training_pb2.JOB_STATE_CANCELLED
        return training_pb2.CancelTrainingJobResponse(job=self.job())

    async def ResumeTrainingJob(self, request: Any, context: Any) -> training_pb2.ResumeTrainingJobResponse:
        raise errors.WrongState("job-1 is running")

    async def WatchTrainingJob(
        self, request: Any, context: Any
    ) -> AsyncIterator[training_pb2.WatchTrainingJobResponse]:
        self.watches.append(request.after_event_id)
        cut = self.cut_after.pop(0) if self.cut_after else None
        yield training_pb2.WatchTrainingJobResponse(job=self.job())
        for sent, event in enumerate(range(request.after_event_id + 1, self.steps + 1)):
            if sent == cut:
                raise errors.Unavailable("the server is shutting down")
            yield training_pb2.WatchTrainingJobResponse(heartbeat=training_pb2.Heartbeat(last_event_id=event))
            message = training_pb2.JobEvent(id=event, attempt=1)
            message.metrics.step = event
            message.metrics.values["loss"] = 1 / event
            yield training_pb2.WatchTrainingJobResponse(event=message)


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
        self.context = serving([self.words, self.shelf, self.book, CatalogGrpc()], settings, shutdown_timeout=0.2)
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
