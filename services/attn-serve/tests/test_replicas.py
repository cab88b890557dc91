"""A model in several replicas: killed, given back and added under streams that notice nothing. One cluster for all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from asking_inference import ask, complete, until
from attn.v1 import model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_core.errors import AttnError, InvalidValue, OutOfCapacity, UserError, WrongState
from attn_engine.client import EngineClient
from attn_engine.in_process import InProcess
from attn_gateway import Cluster, ClusterSettings, ModelToLoad, serving
from attn_schema import DeploymentConfig, EngineConfig
from attn_serve.disaggregation import DisaggregatedReplicas
from attn_serve.replicas import Replicas, fingerprint
from attn_serve.service import InferenceGrpc
from low_rank import make_adapter
from mixed_requests import chaos, mixed_tasks, outcome

pytest.importorskip("fastapi", reason="needs attn-serve[replicas]")
pytestmark = pytest.mark.ray
ONE_THREAD = EngineConfig(num_threads=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(home: Path) -> AsyncIterator[Cluster]:
    models = (ModelToLoad(name="tiny", source="tiny"),)
    made = Cluster(ClusterSettings(cpus=2, home=home, models=models, engine=ONE_THREAD))
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(cluster: Cluster, home: Path) -> AsyncIterator[EngineClient]:
    """Two replicas of "tiny"; a second client of the same deployment joins them where it asks."""
    made = Replicas("two", home / "models" / "tiny", ONE_THREAD, DeploymentConfig(replicas=2))
    await made.start()
    yield made
    await made.stop(5)


@pytest.mark.asyncio(loop_scope="module")
class TestReplicas:
    """In this order: each leaves two replicas."""

    async def test_killed_ones_lose_no_stream(self, engine: EngineClient) -> None:
        report = await asyncio.wait_for(chaos(engine, 8, streams=6, kill_every=3), timeout=150)
        figures = report.figures()
        print(json.dumps(figures))
        assert not report.bad
        assert report.kills >= 1
        assert report.resumed >= 1
        assert report.requests >= 6
        await until(lambda: engine.replicas == 2)

    async def test_one_that_is_given_back_hands_its_streams_over(self, engine: EngineClient) -> None:
        wanted = {name: (await outcome(engine, task)).said for name, task in mixed_tasks().items()}
        begun = asyncio.Semaphore(0)
        running = [asyncio.create_task(outcome(engine, task, begun)) for task in mixed_tasks().values()]
        for _ in range(3):
            await begun.acquire()
        await engine.scale(DeploymentConfig(replicas=1))
        found = dict(zip(wanted, await asyncio.wait_for(asyncio.gather(*running), timeout=60), strict=True))
        assert [name for name in wanted if found[name].said != wanted[name]] == []
        await until(lambda: engine.replicas == 1)
        before = await engine.pids()
        await engine.scale(DeploymentConfig(replicas=2))
        await until(lambda: engine.replicas == 2)
        assert set(before) < set(await engine.pids()), "one that stays was started again"

    async def test_an_adapter_is_on_every_replica_and_on_those_that_come_later(
        self, engine: EngineClient, home: Path
    ) -> None:
        make_adapter(home / "models" / "tiny", "spread", 3)
        merged = InProcess(home / "models" / "spread-merged", ONE_THREAD)
        await merged.start()
        tasks = {name: task for name, task in mixed_tasks().items() if name in {"greedy", "scores", "stop"}}
        wanted = [(await outcome(merged, task)).said for task in tasks.values()]
        await merged.stop(0)
        await engine.load_adapter("spread", home / "models" / "spread")

        async def found() -> list[Any]:
            # Prompts that begin alike would all go to one replica.
            return [
                one.said
                for one in await asyncio.gather(
                    *(outcome(engine, replace(task, adapter="spread")) for task in tasks.values())
                )
            ]

        for _ in range(4):
            assert await found() == wanted
        before = await engine.pids()
        os.kill(before[0], signal.SIGKILL)
        assert await found() == wanted
        await until(lambda: engine.replicas == 2)
        os.kill(before[1], signal.SIGKILL)
        assert await found() == wanted, "the new replica has the adapter too"
        await until(lambda: engine.replicas == 2)
        make_adapter(home / "models" / "tiny", "spread", 4)
        for pid in await engine.pids():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.replicas == 2)
        with pytest.raises(WrongState, match="spread"):
            await found()
        assert (await outcome(engine, tasks["greedy"])).said, "the model goes on"
        await engine.unload_adapter("spread")
        with pytest.raises(UserError, match="spread"):
            await outcome(engine, replace(tasks["greedy"], adapter="spread"))

    async def test_another_gateway_joins_and_leaves_the_replicas_as_they_are(
        self, engine: EngineClient, home: Path
    ) -> None:
        other = Replicas("two", home / "models" / "tiny", ONE_THREAD, DeploymentConfig(replicas=1))
        await other.start()
        assert sorted(await other.pids()) == sorted(await engine.pids())
        task = mixed_tasks()["several with log probabilities"]
        assert (await outcome(other, task)).said == (await outcome(engine, task)).said
        await other.release(5)
        await until(lambda: engine.replicas == 2)
        assert (await outcome(engine, task)).said[1]

    async def test_prompts_are_computed_by_one_kind_of_replica_and_completed_by_another(
        self, engine: EngineClient, home: Path
    ) -> None:
        """And whole by the one that decodes, once the other was killed."""
        tasks = {name: task for name, task in mixed_tasks().items() if name in {"greedy", "sampled", "beams"}}
        wanted = {name: (await outcome(engine, task)).said for name, task in tasks.items()}
        deployment = DeploymentConfig(replicas=1, prefill_replicas=1, prefill_min_tokens=4)
        made = DisaggregatedReplicas.of("split", home / "models" / "tiny", ONE_THREAD, deployment)
        await made.start()
        try:
            for kill in (False, True):
                if kill:
                    os.kill((await made.prefill.pids())[0], signal.SIGKILL)
                answers = await asyncio.gather(*(outcome(made, task) for task in tasks.values()))
                found = dict(zip(tasks, answers, strict=True))
                assert [name for name in tasks if found[name].said != wanted[name]] == []
                if not kill:
                    assert made.outcomes == {"moved": len(tasks)}
        finally:
            await made.stop(5)

    async def test_what_cannot_be_placed_or_loaded_is_said_before_anything_starts(
        self, engine: EngineClient, home: Path, tmp_path: Path
    ) -> None:
        folder = home / "models" / "tiny"
        huge = ONE_THREAD.replace(kv_cache_memory_bytes=2**50)
        large = ONE_THREAD.replace(kv_cache_memory_bytes=2**31)
        with pytest.raises(InvalidValue, match="largest machine"):
            await Replicas("a", folder, huge, DeploymentConfig(replicas=1)).start()
        with pytest.raises(OutOfCapacity, match="1000 replicas cannot be placed"):
            await Replicas("a", folder, large, DeploymentConfig(replicas=1000)).start()
        both = DeploymentConfig(replicas=500, prefill_replicas=500)
        with pytest.raises(OutOfCapacity, match="1000 replicas cannot be placed"):
            await DisaggregatedReplicas.of("a", folder, large, both).start()
        with pytest.raises(OutOfCapacity, match="max_replicas"):
            await Replicas("a", folder, large, DeploymentConfig(max_replicas=1000)).start()
        empty = Replicas("a", tmp_path, ONE_THREAD, DeploymentConfig(replicas=1))
        with pytest.raises(AttnError, match=str(tmp_path)):
            await empty.start()
        await empty.stop(0)
        assert engine.replicas == 2

    async def test_over_the_wire_one_engine_becomes_two_and_streams_go_on(self, cluster: Cluster) -> None:
        service = InferenceGrpc(cluster)
        async with serving([service]) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
            stub, models = InferenceServiceStub(channel), ModelServiceStub(channel)
            alone = await complete(stub, ask("To be", max_new_tokens=200, ignore_eos=True))
            got = (await models.GetModel(model_pb2.GetModelRequest(name="tiny"))).model
            assert got.replicas == 1
            request = model_pb2.ScaleModelRequest(name="tiny")
            with pytest.raises(grpc.aio.AioRpcError, match="max_replicas"):
                await models.ScaleModel(request)
            request.deployment.replicas = 2
            running = [
                asyncio.create_task(complete(stub, ask("To be", max_new_tokens=200, ignore_eos=True))) for _ in range(3)
            ]
            scaled = await models.ScaleModel(request)
            assert scaled.model.replicas == 2
            assert await asyncio.gather(*running) == [alone] * 3
            assert await complete(stub, ask("To be", max_new_tokens=200, ignore_eos=True)) == alone


@pytest.mark.asyncio(loop_scope="module")
async def test_a_deployment_that_another_gateway_deletes_is_given_up(cluster: Cluster, home: Path) -> None:
    first, second = (
        Replicas("ended", home / "models" / "tiny", ONE_THREAD, DeploymentConfig(replicas=1)) for _ in range(2)
    )
    given_up = asyncio.Event()
    second.on_unloaded = given_up.set
    await first.start()
    await second.start()
    await first.stop(0)
    await asyncio.wait_for(given_up.wait(), 60)
    await second.stop(0)


def test_the_fingerprint_changes_with_what_a_replica_computes(home: Path) -> None:
    folder = home / "models" / "tiny"
    same = fingerprint(folder, ONE_THREAD)
    assert fingerprint(folder, EngineConfig(num_threads=1)) == same
    assert fingerprint(folder, ONE_THREAD.replace(dtype="bfloat16")) != same
    assert fingerprint(home / "models" / "tiny-linear", ONE_THREAD) != same


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2, "max_replicas": 3}, "max_replicas"),
        ({"min_replicas": 4, "max_replicas": 3}, "min_replicas"),
        ({"max_replicas": 3, "target_requests": 0}, "target_requests"),
    ],
)
def test_a_deployment_that_contradicts_itself_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        DeploymentConfig(**given)


@pytest.mark.cluster
@pytest.mark.asyncio(loop_scope="module")
async def test_five_minutes_of_killed_replicas_lose_no_stream(cluster: Cluster, home: Path) -> None:
    """50 mixed streams, three replicas, one killed every 10 seconds; `ATTN_CHAOS_REPORT` is a file for figures."""
    seconds = float(os.environ.get("ATTN_CHAOS_SECONDS", "300"))
    deployment = DeploymentConfig(replicas=3)
    made = Replicas("three", home / "models" / "tiny", ONE_THREAD, deployment)
    await made.start()
    try:
        report = await chaos(made, seconds, streams=50, kill_every=10)
    finally:
        await made.stop(5)
    figures = report.figures()
    print(json.dumps(figures))
    if path := os.environ.get("ATTN_CHAOS_REPORT"):
        points = [(round(at, 2), round(gap, 3)) for at, gap in sorted(zip(report.begun, report.gaps, strict=True))]
        run = {"streams": 50, "replicas": 3, "seconds": seconds, "cores": os.cpu_count(), "load": os.getloadavg()}
        told = json.dumps(run | figures | {"killed [s]": report.killed, "began [s], largest gap [s]": points})
        await asyncio.to_thread(Path(path).write_text, told + "\n")
    assert not report.bad
    assert report.resumed > report.kills
    assert figures["gap p95 of all [s]"] <= 1.5


@pytest.mark.cluster
@pytest.mark.asyncio(loop_scope="module")
async def test_a_replica_that_hangs_loses_no_stream(cluster: Cluster, home: Path) -> None:
    """Stopped, not killed: its connection stays open and nothing comes."""
    made = Replicas("hung", home / "models" / "tiny", ONE_THREAD, DeploymentConfig(replicas=2))
    await made.start()
    wanted = {name: (await outcome(made, task)).said for name, task in mixed_tasks().items()}
    begun = asyncio.Semaphore(0)
    names = [*wanted, *wanted]
    running = [asyncio.create_task(outcome(made, mixed_tasks()[name], begun)) for name in names]
    for _ in range(6):
        await begun.acquire()
    stopped = (await made.pids())[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        found = await asyncio.wait_for(asyncio.gather(*running), timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
        await made.stop(5)
    print(json.dumps({"largest gap beside a hung replica [s]": max(one.largest_gap for one in found)}))
    assert [name for name, one in zip(names, found, strict=True) if one.said != wanted[name]] == []
    assert sum(one.resumptions > 0 for one in found) >= 1
