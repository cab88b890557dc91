"""No call tells a tenant of another one: every method of every service, with another's names in every field of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
from attn.v1 import catalog_pb2, inference_pb2, model_pb2, training_pb2
from attn_gateway import Cluster, ClusterSettings, GatewaySettings, handlers_of, serving
from attn_gateway.catalog import CatalogService
from attn_schema import ModelInfo
from attn_schema.methods import INFERENCE, MODELS
from attn_serve.handlers import InferenceHandlers, ModelHandlers
from attn_serve.served_models import ServedModels
from attn_serve.sources import ModelSources
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings
from google.protobuf import message_factory

OWNER, HERS, NOBODYS = "annzq", "7x7z-q1", "8x8z-q2"
"""A tenant, the name of all that is hers, and a name of nothing; both names resemble no other."""
SERVICES = {
    name: service
    for file in (catalog_pb2, inference_pb2, model_pb2, training_pb2)
    for name, service in file.DESCRIPTOR.services_by_name.items()
}
METHODS = [method for service in SERVICES.values() for method in service.methods]
TAKEN = "job_id"
"""The name that all tenants share, so that one that is taken is refused: whose it is stays untold."""


class Idle:
    """An engine that starts and does nothing."""

    scalable = False
    replicas = 1

    async def start(self, *_: Any) -> ModelInfo:
        return ModelInfo(name="")

    async def stop(self, _: float) -> None:
        """Nothing to free."""

    release = leave = stop


class Inference:
    """The inference and model services over engines that do nothing."""

    names = (INFERENCE, MODELS)

    def __init__(self, home: Path) -> None:
        self.served = ServedModels(ModelSources(home), lambda *_: Idle())

    def handlers(self) -> Any:
        inference, models = InferenceHandlers(self.served), ModelHandlers(self.served)
        return handlers_of(INFERENCE, inference) | handlers_of(MODELS, models)

    async def start(self) -> None:
        """Nothing is served to all."""

    async def stop(self, shutdown_timeout: float) -> None:
        await self.served.stop(shutdown_timeout)


def texts(kind: Any, depth: int = 3) -> Iterator[tuple[Any, ...]]:
    """The paths of fields of text in a message."""
    for field in kind.fields:
        if field.type == field.TYPE_STRING:
            yield (field,)
        elif field.message_type and depth and not field.message_type.GetOptions().map_entry:
            yield from ((field, *path) for path in texts(field.message_type, depth - 1))


def put(message: Any, path: tuple[Any, ...], text: str) -> None:
    """Set a field of text, or the first item of a repeated one."""
    for field in path[:-1]:
        inner = getattr(message, field.name)
        message = inner.add() if field.is_repeated else inner
    name, value = path[-1].name, getattr(message, path[-1].name)
    value.append(text) if path[-1].is_repeated else setattr(message, name, text)


def requests(method: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of requests that differ in the name of something hers and of nothing: in each field alone, and in all."""
    kind = message_factory.GetMessageClass(method.input_type)
    paths = list(texts(method.input_type))
    for chosen in (
        [],
        *([path] for path in paths),
        [path for path in paths if len(path) == 1 and path[0].name != TAKEN],
    ):
        pair = kind(), kind()
        for message, text in zip(pair, (HERS, NOBODYS), strict=True):
            for path in chosen:
                put(message, path, text)
        yield pair


async def answer(channel: grpc.aio.Channel, method: Any, request: Any, token: str) -> str:
    """All that a caller is told: the answer, or the error with its details."""
    kind = message_factory.GetMessageClass(method.output_type)
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    path = f"/{method.containing_service.full_name}/{method.name}"
    call = make(path, type(request).SerializeToString, kind.FromString)(
        request, metadata=(("authorization", f"Bearer {token}"),), timeout=60
    )
    try:
        return str([message async for message in call] if method.server_streaming else await call)
    except grpc.aio.AioRpcError as error:
        told = {key: value for key, value in error.trailing_metadata() if key != "x-request-id"}
        return f"{error.code()} {error.details()} {told}"


async def test_no_answer_depends_on_what_another_tenant_has(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"op\none tenant={OWNER} max_running=5\ntwo tenant=bob\n")
    tokens.chmod(0o600)
    home = tmp_path / "home"
    (home / "models" / "m").mkdir(parents=True)
    (home / "models" / "m" / "config.json").write_text("{}")
    (home / "data").mkdir()
    (home / "data" / "words.txt").write_text("to be or not to be " * 100)
    training = TrainingGrpc(Cluster(ClusterSettings(home=home)), TrainSettings())
    services = [CatalogService(), Inference(home), training]
    job = training_pb2.TrainingConfig(
        model=training_pb2.ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=8, mechanism="mha"),
        data=training_pb2.DataConfig(dataset=str(home / "data" / "words.txt")),
        optimizer=training_pb2.OptimizerConfig(steps=10**6),
    )
    async with (
        serving(services, GatewaySettings(port=0, token_file=tokens), shutdown_timeout=20.0) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):

        async def tell(service: str, name: str, request: Any, token: str) -> str:
            return await answer(channel, SERVICES[service].methods_by_name[name], request, token)

        load = model_pb2.LoadModelRequest(name=HERS, source="m")
        assert HERS in await tell("ModelService", "LoadModel", load, "one")
        submit = training_pb2.SubmitTrainingJobRequest(job_id=HERS, config=job)
        assert HERS in await tell("TrainingService", "SubmitTrainingJob", submit, "one")
        apart = []
        for method in METHODS:
            for hers, nobodys in requests(method):
                told = [await answer(channel, method, request, "two") for request in (hers, nobodys)]
                same = told[0].replace(HERS, NOBODYS) == told[1] or getattr(hers, TAKEN, "")
                apart += [] if same and OWNER not in told[0] else [(method.name, hers, told)]
        assert not apart
        cancel = training_pb2.CancelTrainingJobRequest(id=HERS)
        assert HERS in await tell("TrainingService", "CancelTrainingJob", cancel, "one")
