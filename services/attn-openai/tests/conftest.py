"""Small real models, served over gRPC and HTTP by a real gateway in this process."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from attn_engine.client import EngineClient
from attn_engine.in_process import InProcess
from attn_gateway import Gateway, GatewaySettings, TlsFiles, handlers_of, serving
from attn_gateway.catalog import CatalogService
from attn_models.adapters.bert import BertAdapter
from attn_models.adapters.state_dict import stored_tensors
from attn_models.decoder.decoder import Decoder
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_models.weights import write_folder
from attn_openai.server import UvicornServer
from attn_schema import EngineConfig
from attn_schema.decoder import DecoderConfig
from attn_schema.methods import INFERENCE, MODELS
from attn_serve.handlers import InferenceHandlers, ModelHandlers
from attn_serve.served_models import ServedModels
from attn_serve.sources import ModelSources

CONTEXT = 1024
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tiny(folder: Path) -> None:
    """A random decoder that spells any text, byte by byte, and has a chat template."""
    torch.manual_seed(1)
    tokenizer = byte_pair_tokenizer(["to be or not to be, that is the question"], 280)
    tokenizer.settings = dataclasses.replace(tokenizer.settings, chat_template=TEMPLATE)
    model = Decoder(
        DecoderConfig(
            vocab_size=tokenizer.vocab_size, max_seq_len=CONTEXT, hidden_size=32, num_layers=2, num_heads=4,
            mechanism="mha",
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # as drawn, every token is about as likely as every other
    save_model(folder, model, tokenizer)


def save_encoder(folder: Path) -> None:
    """A random BERT of one layer, whose vectors have 8 components."""
    torch.manual_seed(3)
    tokenizer = character_tokenizer("abcd ")
    config = EncoderConfig(
        vocab_size=tokenizer.vocab_size, max_seq_len=12, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8
    )
    tensors = stored_tensors(Encoder(config).state_dict(), BertAdapter())
    stored = {
        "model_type": "bert", "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 12, "hidden_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    }  # fmt: skip
    write_folder(folder, stored, tensors, tokenizer.files())


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the decoder "tiny" and the encoder "tiny-bert"."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "models" / "tiny")
    save_encoder(folder / "models" / "tiny-bert")
    return folder


class LocalInference:
    """The inference and model services with engines in this process."""

    names = (INFERENCE, MODELS)

    def __init__(self, home: Path) -> None:
        self.served = ServedModels(ModelSources(home), self._make)

    def handlers(self) -> Any:
        inference, models = InferenceHandlers(self.served), ModelHandlers(self.served)
        return handlers_of(INFERENCE, inference) | handlers_of(MODELS, models)

    async def start(self) -> None:
        for name in ("tiny", "tiny-bert"):
            await self.served.load(name, "", EngineConfig(num_threads=1))

    async def stop(self, shutdown_timeout: float) -> None:
        await self.served.stop(shutdown_timeout)

    @staticmethod
    def _make(name: str, folder: Path, config: EngineConfig, deployment: Any) -> EngineClient:
        return InProcess(folder, config)


@pytest.fixture
async def inference(home: Path) -> LocalInference:
    return LocalInference(home)


@pytest.fixture
def settings() -> GatewaySettings:
    """Loopback, any free ports, no token; a test may ask for others with `pytest.mark.parametrize`."""
    return GatewaySettings(port=0, http_port=0)


@pytest.fixture
async def gateway(inference: LocalInference, settings: GatewaySettings) -> AsyncIterator[Gateway]:
    async with serving([inference, CatalogService()], settings, http=UvicornServer()) as running:
        yield running


@pytest.fixture
def url(gateway: Gateway) -> str:
    assert gateway.http is not None
    return f"http://{gateway.http.address}"


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[Any]:
    """OpenAI's own client."""
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A key and a self-signed certificate for localhost."""
    folder: Path = tmp_path_factory.mktemp("tls")
    files = TlsFiles(certificate=folder / "cert.pem", key=folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(files.key), "-out", str(files.certificate)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return files
