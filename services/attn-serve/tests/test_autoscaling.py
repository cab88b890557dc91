"""The number of replicas follows the load, down to none; the request that finds none waits for one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from asking_inference import until
from attn_engine.client import EngineClient
from attn_gateway import Cluster, ClusterSettings
from attn_schema import DeploymentConfig, EngineConfig
from attn_serve.replicas import Replicas
from mixed_requests import mixed_tasks, outcome

pytest.importorskip("fastapi", reason="needs attn-serve[replicas]")
pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]
ONE_THREAD = EngineConfig(num_threads=1)
SECONDS = 120.0
"""How long a change of the number may take on a busy machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(home: Path) -> AsyncIterator[Cluster]:
    made = Cluster(ClusterSettings(cpus=2, home=home))
    await made.start()
    yield made
    await made.stop()


async def served(name: str, home: Path, deployment: DeploymentConfig) -> EngineClient:
    engine = Replicas(name, home / "models" / "tiny", ONE_THREAD, deployment)
    await engine.start()
    return engine


async def test_load_raises_the_number_of_replicas_and_idleness_lowers_it(cluster: Cluster, home: Path) -> None:
    deployment = DeploymentConfig(max_replicas=2, target_requests=2, idle_seconds=3)
    engine = await served("loaded", home, deployment)
    try:
        assert engine.replicas == 1
        wanted = {name: (await outcome(engine, task)).said for name, task in mixed_tasks().items()}
        loaded, different = True, []

        async def ask(name: str) -> None:
            while loaded:
                if (await outcome(engine, mixed_tasks()[name])).said != wanted[name]:
                    different.append(name)

        asked = [asyncio.create_task(ask(name)) for name in wanted]
        began = time.monotonic()
        await until(lambda: engine.replicas == 2, SECONDS)
        raised, began = time.monotonic() - began, time.monotonic()
        loaded = False
        await asyncio.gather(*asked)
        await until(lambda: engine.replicas == 1, SECONDS)
        print(json.dumps({"1 to 2 replicas [s]": round(raised, 1), "back [s]": round(time.monotonic() - began, 1)}))
        assert different == []
        assert (await outcome(engine, mixed_tasks()["greedy"])).said == wanted["greedy"]
    finally:
        await engine.stop(0)


async def test_an_idle_model_has_no_replica_and_the_next_requests_wait_for_one(cluster: Cluster, home: Path) -> None:
    deployment = DeploymentConfig(min_replicas=0, max_replicas=2, idle_seconds=2)
    engine = await served("idle", home, deployment)
    try:
        wanted = {name: (await outcome(engine, task)).said for name, task in mixed_tasks().items()}
        await until(lambda: engine.replicas == 0, SECONDS)
        await asyncio.sleep(5)
        assert engine.replicas == 0, "one was started that nobody asked for"
        began = time.monotonic()
        found = await asyncio.gather(*(outcome(engine, task) for task in mixed_tasks().values()))
        print(json.dumps({"answers after a start from none [s]": round(time.monotonic() - began, 1)}))
        assert [one.said for one in found] == list(wanted.values())
    finally:
        await engine.stop(0)
