"""Jobs on a real Ray: detached supervisors, workers that are killed."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc.aio
import psutil
import pytest
from attn.v1 import training_pb2 as pb
from attn.v1.training_pb2_grpc import TrainingServiceStub
from attn_gateway import Cluster, ClusterSettings, serving
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


def process_of(word: str) -> psutil.Process:
    """The Ray worker process whose title names the actor class `word`."""
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if f"ray::{word}" in " ".join(child.cmdline()))


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


async def none_left(name: str) -> None:
    """Wait until no process below this one has a name with these words."""
    for _ in range(300):
        left = [child for child in psutil.Process().children(recursive=True) if name in child.name()]
        if not left:
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"{left} are still there")


async def test_killed_workers_and_supervisors_cost_an_interval_and_not_a_bit(home, wire_config, submit):
    wire_config.optimizer.steps = 600
    wire_config.checkpoint.save_steps = 50
    wire_config.max_failures = 2
    victims = {120: "RayWorkerActor", 260: "RaySupervisorActor", 380: "RayWorkerActor"}

    def strike(step: int) -> None:
        due = [at for at in victims if step >= at]
        for at in due:
            os.kill(process_of(victims.pop(at)).pid, signal.SIGKILL)

    others = set(psutil.Process().children(recursive=True))
    cluster = Cluster(ClusterSettings(home=home, cpus=2))
    try:
        async with (
            serving([TrainingGrpc(cluster, TrainSettings(threads=1))], shutdown_timeout=20.0) as gateway,
            grpc.aio.insecure_channel(gateway.address) as channel,
        ):
            stub = TrainingServiceStub(channel)
            await submit(stub, wire_config, "undisturbed")
            reference = dict(losses(await follow(stub, "undisturbed", lambda step: None)))
            await submit(stub, wire_config, "struck")
            events = await follow(stub, "struck", strike)
            job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="struck"))).job
            await none_left("ray::Ray")
    finally:
        await cluster.stop()
    assert not victims
    assert job.state == pb.JOB_STATE_SUCCEEDED
    assert job.attempt == 4
    assert dict(losses(events)) == reference
    assert all(loss == reference[step] for step, loss in losses(events))
    recoveries = [event for event in events if event.state_change.current == pb.JOB_STATE_RECOVERING]
    assert len(recoveries) == 3
    assert all(event.state_change.error.message for event in recoveries)
    assert set(psutil.Process().children(recursive=True)) <= others


async def test_a_group_of_workers_survives_one_of_them_and_finds_the_losses_of_one_worker(home, wire_config, submit):
    wire_config.optimizer.steps = 60
    wire_config.checkpoint.save_steps = 10
    wire_config.max_failures = 2
    victims = {25: "RayRankActor"}

    def strike(step: int) -> None:
        for at in [at for at in victims if step >= at]:
            os.kill(process_of(victims.pop(at)).pid, signal.SIGKILL)

    cluster = Cluster(ClusterSettings(home=home, cpus=2))
    try:
        async with (
            serving([TrainingGrpc(cluster, TrainSettings(threads=1))], shutdown_timeout=20.0) as gateway,
            grpc.aio.insecure_channel(gateway.address) as channel,
        ):
            stub = TrainingServiceStub(channel)
            await submit(stub, wire_config, "one")
            reference = dict(losses(await follow(stub, "one", lambda step: None)))
            wire_config.workers, wire_config.dp_shard = 2, 2
            await submit(stub, wire_config, "two")
            events = await follow(stub, "two", strike)
            job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="two"))).job
    finally:
        await cluster.stop()
    assert not victims
    assert job.state == pb.JOB_STATE_SUCCEEDED
    assert job.attempt == 2
    assert dict(losses(events)).keys() == reference.keys()
    assert all(loss == pytest.approx(reference[step], abs=1e-5) for step, loss in losses(events))
