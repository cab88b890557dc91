"""Metrics of engines carry the replica, and the totals of a model are not counted beside them."""

from __future__ import annotations

import re
from typing import Any

import grpc.aio
from attn.v1 import inference_pb2, model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from attn.v1.model_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from attn_gateway import serving


class Replicated(InferenceServiceServicer, ModelServiceServicer):
    """A model of two engines, and one of one."""

    names = ("attn.v1.InferenceService", "attn.v1.ModelService")

    def add_to(self, server: grpc.aio.Server) -> None:
        add_InferenceServiceServicer_to_server(self, server)
        add_ModelServiceServicer_to_server(self, server)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the call
        serving_now = model_pb2.MODEL_STATE_SERVING
        models = [model_pb2.ModelInfo(name=name, state=serving_now) for name in ("one", "two")]
        return model_pb2.ListModelsResponse(models=models)

    async def GetEngineStats(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the call
        stats = inference_pb2.GetEngineStatsResponse(running=3, computed_tokens=30)
        if request.model == "two":
            for name, running in (("a", 1), ("b", 2)):
                part = inference_pb2.GetEngineStatsResponse(running=running, computed_tokens=10 * running)
                stats.replicas.add(name=name, stats=part)
        return stats


async def test_each_replica_has_metrics_of_its_own() -> None:
    async with serving([Replicated()]) as gateway:
        text = (await gateway.metrics(())).decode()
    found = re.findall(r'^attn_num_requests_running{model_name="(\w+)",replica="(\w+)"} (\S+)$', text, re.MULTILINE)
    assert sorted(found) == [("one", "0", "3.0"), ("two", "a", "1.0"), ("two", "b", "2.0")]
    computed = re.findall(r'^attn_computed_tokens_total{model_name="two",replica="\w+"} (\S+)$', text, re.MULTILINE)
    assert sorted(map(float, computed)) == [10, 20]
