"""Small real models in a home of their own, and the inference service behind a real gateway."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_engine.client import EngineClient
from attn_engine.in_process import InProcess
from attn_gateway import Gateway, handlers_of, serving
from attn_models.adapters.bert import BertAdapter
from attn_models.adapters.state_dict import stored_tensors
from attn_models.decoder.decoder import Decoder
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_models.weights import write_folder
from attn_schema import EngineConfig
from attn_schema.decoder import AttentionChoice, DecoderConfig
from attn_schema.methods import INFERENCE, MODELS
from attn_serve.handlers import InferenceHandlers, ModelHandlers
from attn_serve.served_models import ServedModels
from attn_serve.sources import ModelSources

# With importlib mode a test file cannot import its neighbour.
sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).resolve().parents[3]
NUMBERS = count()
ALPHABET = "abcdefghijklmnopqrstuvwxyz ?.ABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
CONTEXT = 256


def save_tiny(folder: Path, mechanism: str, seed: int, *others: str) -> None:
    """A random model, so small that a test takes milliseconds; with `others` its layers take turns."""
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(ALPHABET)
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        max_seq_len=CONTEXT,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        mechanism=mechanism,
        pattern=tuple(AttentionChoice(mechanism=name) for name in (mechanism, *others)) if others else (),
    )
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # as drawn, every token is about as likely as every other
    save_model(folder, model, tokenizer)


@pytest.fixture
def saved_tiny(tmp_path: Path) -> Callable[..., Path]:
    """Saves a model whose layers have these mechanisms in turn, and returns its folder."""

    def save(*mechanisms: str) -> Path:
        save_tiny(tmp_path / "tiny", mechanisms[0], 4, *mechanisms[1:])
        return tmp_path / "tiny"

    return save


def save_encoder(folder: Path) -> None:
    """A random BERT of one layer, with a context of 12 tokens."""
    torch.manual_seed(3)
    tokenizer = character_tokenizer("abcd ")
    sizes = {
        "vocab_size": tokenizer.vocab_size,
        "max_seq_len": 12,
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "intermediate_size": 8,
    }
    tensors = stored_tensors(Encoder(EncoderConfig(**sizes)).state_dict(), BertAdapter())
    names = {
        "vocab_size": "vocab_size",
        "max_seq_len": "max_position_embeddings",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
    }
    config = {"model_type": "bert"} | {names[name]: size for name, size in sizes.items()}
    write_folder(folder, config, tensors, tokenizer.files())


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the models "tiny" and "tiny-linear", and the encoder "tiny-bert"."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "models" / "tiny", "mha", seed=1)
    save_tiny(folder / "models" / "tiny-linear", "linear", seed=2)
    save_encoder(folder / "models" / "tiny-bert")
    return folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A running PostgreSQL server, by the helper of attn-gateway's own tests."""
    path = ROOT / "services/attn-gateway/tests/records/postgres_server.py"
    spec = importlib.util.spec_from_file_location("postgres_server", path)
    assert spec is not None
    assert spec.loader is not None
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    reason = helper.why_not()
    if reason is not None:
        pytest.skip(reason)
    with helper.postgres_server(helper.programs()) as server:
        yield server


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database: SQLite's, unless a test asks for the other kind."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{tmp_path / 'records.sqlite3'}"
    server = request.getfixturevalue("postgres")
    name = f"test_{next(NUMBERS)}"
    server.execute(f"CREATE DATABASE {name}")
    return str(server.url).replace("/postgres?", f"/{name}?")


class LocalInference:
    """The inference and model services with engines in this process."""

    names = (INFERENCE, MODELS)

    def __init__(self, home: Path) -> None:
        self.served = ServedModels(ModelSources(home), self._make)

    def handlers(self) -> Any:
        inference, models = InferenceHandlers(self.served), ModelHandlers(self.served)
        return handlers_of(INFERENCE, inference) | handlers_of(MODELS, models)

    async def start(self) -> None:
        await self.served.load("tiny", "", EngineConfig(num_threads=1))

    async def stop(self, shutdown_timeout: float) -> None:
        await self.served.stop(shutdown_timeout)

    @staticmethod
    def _make(name: str, folder: Path, config: EngineConfig, deployment: Any) -> EngineClient:
        return InProcess(folder, config)


@pytest.fixture
async def inference(home: Path) -> LocalInference:
    return LocalInference(home)


@pytest.fixture
async def gateway(inference: LocalInference) -> AsyncIterator[Gateway]:
    async with serving([inference]) as running:
        yield running


@pytest.fixture
async def channel(gateway: Gateway) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(gateway.address) as opened:
        yield opened


@pytest.fixture
async def stub(channel: grpc.aio.Channel) -> InferenceServiceStub:
    return InferenceServiceStub(channel)


@pytest.fixture
async def models(channel: grpc.aio.Channel) -> ModelServiceStub:
    return ModelServiceStub(channel)
