"""A real gateway on loopback with training behind it, and a real client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from attn.v1 import training_pb2 as pb
from attn.v1.training_pb2_grpc import TrainingServiceStub
from attn_gateway import Cluster, ClusterSettings, GatewaySettings, serving
from attn_train.service import InProcessTrainingGrpc
from attn_train.settings import TrainSettings


@pytest.fixture
def home(tmp_path: Path, words: str) -> Path:
    folder = tmp_path / "home"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "words.txt").write_text(words)
    return folder


@pytest.fixture
def wire_config(home: Path) -> pb.TrainingConfig:
    """Twenty steps of a small decoder."""
    return pb.TrainingConfig(
        model=pb.ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=8, mechanism="mha"),
        data=pb.DataConfig(dataset=str(home / "data" / "words.txt")),
        optimizer=pb.OptimizerConfig(steps=20, batch_size=4, learning_rate=1e-2, warmup_steps=2),
        checkpoint=pb.CheckpointConfig(save_steps=10),
        evaluation=pb.EvaluationConfig(eval_steps=10, eval_batches=2),
        seed=5,
    )


Serve = Callable[..., contextlib.AbstractAsyncContextManager[TrainingServiceStub]]


@contextlib.asynccontextmanager
async def served(
    home: Path, settings: TrainSettings, gateway: GatewaySettings | None = None
) -> AsyncIterator[TrainingServiceStub]:
    service = InProcessTrainingGrpc(Cluster(ClusterSettings(home=home)), settings)
    async with (
        serving([service], gateway, shutdown_timeout=20.0) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield TrainingServiceStub(channel)


@pytest.fixture
def server(home: Path) -> Serve:
    """`async with server() as stub`: a server over the same home each time."""
    return lambda **settings: served(home, TrainSettings(**settings))


@pytest.fixture
def shared(home: Path, tmp_path: Path) -> Serve:
    """`async with shared() as stub`: a server with the tokens `op` of the operator, `one` and `two` of tenants."""
    file = tmp_path / "tokens"
    file.write_text("op\none tenant=ann\ntwo tenant=bob\n")
    file.chmod(0o600)
    return lambda: served(home, TrainSettings(), GatewaySettings(port=0, token_file=file))


@pytest.fixture
def by() -> Callable[[str], dict[str, Any]]:
    """What a call with a token is made with."""
    return lambda token: {"metadata": (("authorization", f"Bearer {token}"),)}


async def submit(stub: TrainingServiceStub, config: pb.TrainingConfig, job_id: str = "") -> pb.TrainingJob:
    return (await stub.SubmitTrainingJob(pb.SubmitTrainingJobRequest(job_id=job_id, config=config))).job


async def watch(stub: TrainingServiceStub, job_id: str, after: int = 0) -> list[pb.WatchTrainingJobResponse]:
    """Everything until the stream ends."""
    request = pb.WatchTrainingJobRequest(id=job_id, after_event_id=after)
    return [response async for response in stub.WatchTrainingJob(request)]


@pytest.fixture(name="submit")
def submit_fixture():
    return submit


@pytest.fixture(name="watch")
def watch_fixture():
    return watch
