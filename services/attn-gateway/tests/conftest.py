"""A small real service over the wire format, and a gateway in front of it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from attn.v1 import common_pb2
from attn.v1 import inference_pb2 as pb
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_core import errors
from attn_gateway import Call, Gateway, TlsFiles, serving
from attn_schema import GenerateRequest, OutputDelta, Token, Tokenization, TokenizeRequest
from attn_schema.methods import GENERATE, INFERENCE, TOKENIZE


class Received:
    """What a stream brought before it ended, and how it ended."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.failure: grpc.aio.AioRpcError | None = None

    @classmethod
    async def all_of(cls, call: Any) -> Received:
        received = cls()
        try:
            async for message in call:
                received.texts.append(message.text)
        except grpc.aio.AioRpcError as failure:
            received.failure = failure
        return received


class Words:
    """Splits text into words: Tokenize returns them, Generate streams them slowly; some models are errors."""

    names = (INFERENCE,)

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.freed = asyncio.Event()
        self.asked_to_start = asyncio.Event()
        self.let_start = asyncio.Event()
        self.let_start.set()
        self.stopped_with: float | None = None

    def handlers(self) -> Any:
        return {TOKENIZE: self.answer, GENERATE: self.stream}

    async def start(self) -> None:
        self.asked_to_start.set()
        await self.let_start.wait()

    async def stop(self, shutdown_timeout: float) -> None:
        self.stopped_with = shutdown_timeout

    @staticmethod
    def tokenize(model: str = "words", text: str = "one two three") -> pb.TokenizeRequest:
        return pb.TokenizeRequest(model=model, prompt=common_pb2.Prompt(text=text))

    @staticmethod
    def generate(text: str = "one two three") -> pb.GenerateRequest:
        return pb.GenerateRequest(model="words", prompt=common_pb2.Prompt(text=text))

    async def answer(self, request: TokenizeRequest, call: Call) -> Tokenization:
        self.calls.append(call)
        if request.model == "unknown":
            raise errors.UnknownName.of("model", "smolm2", ["smollm2"])
        if request.model == "invalid":
            raise errors.InvalidValue.of("temperature", -1, "0 or more")
        if request.model == "full":
            raise errors.OutOfCapacity("too many requests", retry_seconds=2.5)
        if request.model == "bug":
            raise RuntimeError("secret prompt")
        text = request.prompt.text or ""
        tokens = tuple(Token(id=number, text=word) for number, word in enumerate(text.split()))
        return Tokenization(tokens=tokens, text=text)

    async def stream(self, request: GenerateRequest, call: Call) -> AsyncIterator[OutputDelta]:
        self.calls.append(call)
        try:
            for word in (request.prompt.text or "").split():
                if word == "bug":
                    raise RuntimeError("secret prompt")
                yield OutputDelta(text=word)
                await asyncio.sleep(0.01)
        finally:
            self.freed.set()


@pytest.fixture
def receive() -> Any:
    return Received.all_of


@pytest.fixture
async def words() -> Words:
    return Words()


@pytest.fixture
async def gateway(words: Words) -> AsyncIterator[Gateway]:
    async with serving([words]) as running:
        yield running


@pytest.fixture
async def channel(gateway: Gateway) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(gateway.address) as opened:
        yield opened


@pytest.fixture
async def stub(channel: grpc.aio.Channel) -> InferenceServiceStub:
    return InferenceServiceStub(channel)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A key and a self-signed certificate for localhost."""
    folder: Path = tmp_path_factory.mktemp("tls")
    files = TlsFiles(certificate=folder / "cert.pem", key=folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    paths = ["-keyout", str(files.key), "-out", str(files.certificate)]
    subprocess.run([*command.split(), *names, *paths], check=True, capture_output=True)
    return files
