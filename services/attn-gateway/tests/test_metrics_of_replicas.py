"""Metrics of engines carry the replica, and the totals of a model are not counted beside them."""

from __future__ import annotations

import re
from typing import Any

from attn_gateway import handlers_of, serving
from attn_schema import EngineStats, ModelInfo, ModelState, ReplicaStats
from attn_schema.methods import INFERENCE, MODELS, ListModelsResponse


class Replicated:
    """A model of two engines, and one of one."""

    names = (INFERENCE, MODELS)

    def handlers(self) -> Any:
        return handlers_of(INFERENCE, self) | handlers_of(MODELS, self)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    async def list_models(self, *_: Any) -> ListModelsResponse:
        return ListModelsResponse(
            models=tuple(ModelInfo(name=name, state=ModelState.SERVING) for name in ("one", "two"))
        )

    async def get_engine_stats(self, request: Any, _: Any) -> EngineStats:
        parts = [
            ReplicaStats(name=name, stats=EngineStats(running=running, computed_tokens=10 * running))
            for name, running in (("a", 1), ("b", 2))
        ]
        return EngineStats(running=3, computed_tokens=30, replicas=tuple(parts if request.model == "two" else ()))


async def test_each_replica_has_metrics_of_its_own() -> None:
    async with serving([Replicated()]) as gateway:
        text = (await gateway.metrics(())).decode()
    found = re.findall(r'^attn_num_requests_running{model_name="(\w+)",replica="(\w+)"} (\S+)$', text, re.MULTILINE)
    assert sorted(found) == [("one", "0", "3.0"), ("two", "a", "1.0"), ("two", "b", "2.0")]
    computed = re.findall(r'^attn_computed_tokens_total{model_name="two",replica="\w+"} (\S+)$', text, re.MULTILINE)
    assert sorted(map(float, computed)) == [10, 20]
