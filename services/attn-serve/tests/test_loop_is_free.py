"""Nothing heavy runs on the loop that all streams share: no callback uses the processor for long, whatever is asked."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from asking_inference import ask, complete, until
from attn.v1 import common_pb2, inference_pb2, model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_gateway import Gateway, serving
from attn_gateway.records import ArtifactStore, Database, ModelRecord, ModelRecords
from attn_serve.served_models import ServedModels
from attn_serve.sources import ModelSources
from low_rank import make_adapter

LIMIT = 0.1
"""Seconds of processor time that a callback may use: the largest gap that others may cause to a stream."""
MESSAGE = 4 * 2**20 - 1000
"""Bytes of the largest requests."""


def name_of(handle: asyncio.Handle) -> str:
    """The function that a callback goes on with."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_name()}: {getattr(task.get_coro(), '__qualname__', task)}"
    return getattr(callback, "__qualname__", repr(callback))


@contextmanager
def callback_seconds() -> Iterator[dict[str, float]]:
    """The most processor time that a callback of this thread's loop used at once, by its name.

    Of this thread alone, so that other work on the machine changes nothing.
    """
    found: dict[str, float] = {}
    run, thread = events.Handle._run, threading.get_ident()  # type: ignore[attr-defined]

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            return run(handle)
        name, began = name_of(handle), time.thread_time()
        try:
            return run(handle)
        finally:
            found[name] = max(found.get(name, 0.0), time.thread_time() - began)

    events.Handle._run = timed  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        events.Handle._run = run  # type: ignore[attr-defined]


def heavy(found: dict[str, float]) -> dict[str, float]:
    """The callbacks that used more than they may."""
    return {name: round(seconds, 3) for name, seconds in found.items() if seconds > LIMIT}


async def test_a_callback_that_computes_is_named_and_one_that_waits_is_not() -> None:
    async def computes() -> None:
        until = time.thread_time() + 2 * LIMIT
        while time.thread_time() < until:
            pass

    async def waits() -> None:
        time.sleep(2 * LIMIT)  # noqa: ASYNC251 - as a thread that is not let run

    with callback_seconds() as found:
        await asyncio.gather(asyncio.create_task(computes()), asyncio.create_task(waits()))
    assert [name.rpartition(".")[2] for name in heavy(found)] == ["computes"]


def schema_of(properties: int) -> str:
    """A JSON schema of so many objects."""
    inner = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{3,20}$"}}}
    return json.dumps({"type": "object", "properties": {f"property{i}": inner for i in range(properties)}})


def long_text() -> common_pb2.Prompt:
    """The longest text that a message holds."""
    return common_pb2.Prompt(text="a" * MESSAGE)


def long_ids() -> common_pb2.Prompt:
    """The most token ids that a message holds."""
    return common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[5] * (MESSAGE - 10)))


def long_chat() -> common_pb2.Prompt:
    """The most turns that a message holds."""
    turns = [common_pb2.ChatMessage(role="user", content="hi")] * (MESSAGE // 16)
    return common_pb2.Prompt(chat=common_pb2.Chat(messages=turns))


def generate(prompt: common_pb2.Prompt, **fields: Any) -> inference_pb2.GenerateRequest:
    """A request for tokens of the tiny model."""
    return inference_pb2.GenerateRequest(model="tiny", prompt=prompt, **fields)


SHORT = common_pb2.Prompt(text="a" * 250)
GRAMMAR, BIASES = inference_pb2.StructuredOutput, inference_pb2.SamplingParams
REQUESTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a long prompt": ("Generate", lambda: generate(long_text())),
    "many token ids": ("Generate", lambda: generate(long_ids())),
    "a long conversation": ("Generate", lambda: generate(long_chat())),
    "many biases": (
        "Generate",
        lambda: generate(SHORT, sampling=BIASES(logit_bias=dict.fromkeys(range(300_000), 1.0))),
    ),
    "a large schema": (
        "Generate",
        lambda: ask(structured_output=GRAMMAR(json_schema=schema_of(1530)), max_new_tokens=8),
    ),
    "many ids to tokenise": ("Tokenize", lambda: inference_pb2.TokenizeRequest(model="tiny", prompt=long_ids())),
    "many prompts to score": ("Score", lambda: inference_pb2.ScoreRequest(model="tiny", prompts=[SHORT] * 16)),
    "long prompts to score": ("Score", lambda: inference_pb2.ScoreRequest(model="tiny", prompts=[long_text()])),
    "many texts to embed": ("Embed", lambda: inference_pb2.EmbedRequest(model="tiny-bert", texts=["ab"] * 1024)),
    "too many texts to embed": ("Embed", lambda: inference_pb2.EmbedRequest(model="tiny-bert", texts=["ab"] * 500_000)),
    "attention maps": ("AttentionMaps", lambda: inference_pb2.AttentionMapsRequest(model="tiny", prompt=SHORT)),
}
"""What is large or slow, by what it is: the method, and what makes the request."""


def answered(channel: grpc.Channel, method: str, request: Any) -> None:
    """Make a call and read its answer, or its refusal."""
    call = getattr(InferenceServiceStub(channel), method)
    with suppress(grpc.RpcError):
        if method in ("Generate", "AttentionMaps"):
            for _ in call(request):
                pass
        else:
            call(request)


def models_come_and_go(channel: grpc.Channel) -> None:
    """Load and unload a model, and an adapter."""
    models = ModelServiceStub(channel)
    models.LoadModel(model_pb2.LoadModelRequest(name="second", source="tiny-linear"))
    models.UnloadModel(model_pb2.UnloadModelRequest(name="second"))
    models.LoadModel(model_pb2.LoadModelRequest(name="light", base_model="tiny"))
    answered(channel, "Generate", ask(model="light", max_new_tokens=8))
    models.UnloadModel(model_pb2.UnloadModelRequest(name="light"))


async def apart(gateway: Gateway, work: Callable[[grpc.Channel], None]) -> None:
    """Work of a client, in a thread whose time is not the loop's."""

    def run() -> None:
        options = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(gateway.address, options=options) as channel:
            work(channel)

    await asyncio.to_thread(run)


@pytest.fixture
async def encoder(inference: Any, gateway: Gateway) -> None:
    from attn_schema import EngineConfig

    await inference.served.load("tiny-bert", "", EngineConfig(num_threads=1))


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize("kind", REQUESTS)
async def test_no_request_holds_up_the_loop(kind: str, gateway: Gateway) -> None:
    method, make = REQUESTS[kind]
    request = make()
    with callback_seconds() as found:
        await apart(gateway, lambda channel: answered(channel, method, request))
    assert heavy(found) == {}, kind


async def test_models_and_adapters_that_come_and_go_do_not_hold_up_the_loop(home: Path, gateway: Gateway) -> None:
    make_adapter(home / "models" / "tiny", "light", 3)
    with callback_seconds() as found:
        await apart(gateway, models_come_and_go)
    assert heavy(found) == {}


NOTHING = b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>"


class SilentBucket(BaseHTTPRequestHandler):
    """A bucket that takes requests and says nothing until it is `let` to; then it has nothing."""

    asked = 0
    let = threading.Event()
    url = ""

    def do_GET(self) -> None:
        type(self).asked += 1
        self.let.wait()
        listed = "list-type" in self.path
        body = NOTHING if listed else b""
        self.send_response(200 if listed else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


@pytest.fixture
def silent_bucket() -> Iterator[type[SilentBucket]]:
    SilentBucket.asked = 0
    SilentBucket.let.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), SilentBucket)
    server.daemon_threads = True
    SilentBucket.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SilentBucket
    SilentBucket.let.set()
    server.shutdown()


async def test_models_whose_files_do_not_come_hold_up_neither_requests_nor_other_models(
    inference: Any, home: Path, tmp_path: Path, silent_bucket: type[SilentBucket]
) -> None:
    """The pool that asyncio uses for all else has six threads on two cores."""
    options = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "client_options": {"allow_http": True}}
    artifacts = ArtifactStore("s3://bucket/x", tmp_path, aws_endpoint=silent_bucket.url, **options)
    most = min(31, (os.cpu_count() or 1) + 4)
    with Database(f"sqlite:///{tmp_path}/records.sqlite3") as database:
        records = ModelRecords(database)
        inference.served = ServedModels(ModelSources(home, records, artifacts), inference._make)
        names = [f"far-{number}" for number in range(most)]
        for name in names:
            records.record(ModelRecord(name, "", artifact=name))
        async with serving([inference]) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
            stub, models = InferenceServiceStub(channel), ModelServiceStub(channel)
            waiting = [asyncio.ensure_future(models.LoadModel(model_pb2.LoadModelRequest(name=name))) for name in names]
            await until(lambda: silent_bucket.asked >= most)
            prompt = common_pb2.Prompt(text="To be")
            assert (await stub.Tokenize(inference_pb2.TokenizeRequest(model="tiny", prompt=prompt))).tokens
            await models.LoadModel(model_pb2.LoadModelRequest(name="tiny-linear"))
            assert await complete(stub, ask("To be", "tiny-linear", max_new_tokens=3, ignore_eos=True))
            assert not any(load.done() for load in waiting)
            silent_bucket.let.set()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert {answer.code() for answer in answers} == {grpc.StatusCode.NOT_FOUND}
