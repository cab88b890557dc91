"""Jobs whose workers, supervisors and server are killed, in processes of one machine and on a real Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import psutil
import pytest
from attn.v1 import training_pb2 as pb
from attn.v1.training_pb2_grpc import TrainingServiceStub
from attn_core.errors import MissingPackage
from attn_gateway import Cluster, ClusterSettings, serving
from attn_gateway.records import Database, database_url
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings
from attn_train.store import JobStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


RAY = pytest.param(True, id="ray", marks=pytest.mark.ray)
RAY_AGAIN = pytest.param(True, id="ray", marks=[pytest.mark.ray, pytest.mark.cluster])
PROCESSES = pytest.param(False, id="processes")
WORKER = "attn_train.group_worker"
"""What the command line of a worker's process contains."""


def processes_of(words: str) -> list[psutil.Process]:
    """The processes below this one whose command line contains these words."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if words in " ".join(child.cmdline()):
                found.append(child)
    return found


def killing(victims: dict[int, str]) -> Callable[[int], None]:
    """Kill, at each of these steps, a process whose command line contains the words."""

    def strike(step: int) -> None:
        for at in [at for at in victims if step >= at]:
            os.kill(processes_of(victims.pop(at))[-1].pid, signal.SIGKILL)

    return strike


@contextlib.asynccontextmanager
async def training(home: Path, *, ray: bool) -> AsyncIterator[TrainingServiceStub]:
    cluster = Cluster(ClusterSettings(home=home, cpus=2, ray=ray))
    try:
        async with (
            serving([TrainingGrpc(cluster, TrainSettings(threads=1))], shutdown_timeout=20.0) as gateway,
            grpc.aio.insecure_channel(gateway.address) as channel,
        ):
            yield TrainingServiceStub(channel)
    finally:
        await cluster.stop()


async def follow(stub, job_id, on_step):
    """Watch to the end, calling `on_step` for each measured step; all events."""
    events = []
    async for response in stub.WatchTrainingJob(pb.WatchTrainingJobRequest(id=job_id)):
        if response.HasField("event"):
            events.append(response.event)
            if response.event.HasField("metrics"):
                on_step(response.event.metrics.step)
    return events


def losses(events):
    metrics = [event.metrics for event in events if event.HasField("metrics")]
    return [(item.step, item.values["loss"]) for item in metrics if "loss" in item.values]


async def until_gone(words: str) -> None:
    """Wait until no process below this one has these words in its command line."""
    for _ in range(300):
        if not processes_of(words):
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"{processes_of(words)} are still there")


@pytest.mark.parametrize("ray", [PROCESSES, RAY])
async def test_killed_workers_and_supervisors_cost_an_interval_and_not_a_bit(home, wire_config, submit, ray):
    wire_config.optimizer.steps = 240
    wire_config.checkpoint.save_steps = 20
    wire_config.max_failures = 2
    worker = "ray::RayWorkerActor" if ray else WORKER
    victims = {50: worker, 150: "ray::RaySupervisorActor" if ray else worker}
    kills = len(victims)
    others = set(psutil.Process().children(recursive=True))
    async with training(home, ray=ray) as stub:
        await submit(stub, wire_config, "undisturbed")
        reference = dict(losses(await follow(stub, "undisturbed", lambda step: None)))
        await submit(stub, wire_config, "struck")
        events = await follow(stub, "struck", killing(victims))
        job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="struck"))).job
        await until_gone("ray::Ray" if ray else worker)
    assert not victims
    assert job.state == pb.JOB_STATE_SUCCEEDED
    assert job.attempt == kills + 1
    assert dict(losses(events)) == reference
    assert all(loss == reference[step] for step, loss in losses(events))
    recoveries = [event for event in events if event.state_change.current == pb.JOB_STATE_RECOVERING]
    assert len(recoveries) == kills
    assert all(event.state_change.error.message for event in recoveries)
    assert set(psutil.Process().children(recursive=True)) <= others


@pytest.mark.parametrize("ray", [PROCESSES, RAY_AGAIN])
async def test_a_group_of_workers_survives_one_of_them_and_finds_the_losses_of_one_worker(
    home, wire_config, submit, ray
):
    wire_config.optimizer.steps = 60
    wire_config.checkpoint.save_steps = 10
    wire_config.max_failures = 2
    victims = {25: "ray::RayRankActor" if ray else WORKER}
    async with training(home, ray=ray) as stub:
        await submit(stub, wire_config, "one")
        reference = dict(losses(await follow(stub, "one", lambda step: None)))
        wire_config.workers, wire_config.dp_shard = 2, 2
        await submit(stub, wire_config, "two")
        events = await follow(stub, "two", killing(victims))
        job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="two"))).job
    assert not victims
    assert job.state == pb.JOB_STATE_SUCCEEDED
    assert job.attempt == 2
    assert dict(losses(events)).keys() == reference.keys()
    assert all(loss == pytest.approx(reference[step], abs=1e-5) for step, loss in losses(events))


def test_the_workers_of_a_killed_server_end_and_the_next_server_goes_on_without_losing_a_bit(
    tmp_path, server_command, unending, follow
):
    asked = unending(25, dp_shard=2)
    with Database(database_url(tmp_path)) as database:
        store = JobStore(database)
        job = follow(store)
        store.submit("struck", asked)
        server = subprocess.Popen(server_command(tmp_path, ""))
        try:
            job.steps_on("struck")
            workers = processes_of(WORKER)
            assert len(workers) == 2
            server.kill()
            server.wait()
            assert psutil.wait_procs(workers, timeout=60)[1] == []
            server = subprocess.Popen(server_command(tmp_path, ""))
            job.steps_on_or_back("struck", 20)
            job.end("struck")
            job.require_same_bits("struck", asked)
        finally:
            server.kill()
            server.wait()


async def test_two_workers_train_to_the_end_without_ray(home, wire_config, submit, monkeypatch, tmp_path):
    """Also in the workers, whose imports find no Ray."""
    (tmp_path / "ray.py").write_text("raise ImportError('there is no Ray')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setitem(sys.modules, "ray", None)
    wire_config.workers = 2
    async with training(home, ray=False) as stub:
        await submit(stub, wire_config, "job")
        await follow(stub, "job", lambda step: None)
        job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="job"))).job
    assert (job.state, job.attempt) == (pb.JOB_STATE_SUCCEEDED, 1)


def test_ray_that_is_asked_for_and_not_installed_is_an_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for asked in ({"ray": True}, {"address": "127.0.0.1:6379"}):
        with pytest.raises(MissingPackage, match="pip install ray"):
            ClusterSettings(home=tmp_path, **asked)
