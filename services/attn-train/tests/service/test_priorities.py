"""A running job leaves for one of a higher priority, comes back, and finds the losses that it would have had."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from attn.v1 import training_pb2 as pb


def losses(responses):
    metrics = [response.event.metrics for response in responses if response.event.HasField("metrics")]
    return {item.step: item.values["loss"] for item in metrics if "loss" in item.values}


async def submit_at(stub, config, job_id, priority):
    request = pb.SubmitTrainingJobRequest(job_id=job_id, config=config, priority=priority)
    return (await stub.SubmitTrainingJob(request)).job


async def get(stub, job_id):
    return (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id=job_id))).job


async def until(ask, wanted):
    async with asyncio.timeout(120):
        while True:
            if wanted(await ask()):
                return
            await asyncio.sleep(0.02)


async def test_a_job_leaves_and_comes_back_with_bit_equal_losses(server, wire_config, watch, home):
    long = pb.TrainingConfig()
    long.CopyFrom(wire_config)
    long.optimizer.steps, long.checkpoint.save_steps = 1500, 10_000
    async with server(max_concurrent_jobs=1) as stub:
        await submit_at(stub, long, "alone", 0)
        reference = losses(await watch(stub, "alone"))
        await submit_at(stub, long, "low", -1)
        async for told in stub.WatchTrainingJob(pb.WatchTrainingJobRequest(id="low")):
            if told.event.HasField("metrics") and told.event.metrics.step >= 20:
                break
        await submit_at(stub, wire_config, "high", 5)
        await watch(stub, "high")
        high = await get(stub, "high")
        told = await watch(stub, "low")
        low = await get(stub, "low")
    assert (high.state, high.priority) == (pb.JOB_STATE_SUCCEEDED, 5)
    assert low.state == pb.JOB_STATE_SUCCEEDED
    changes = [response.event.state_change.current for response in told if response.event.HasField("state_change")]
    said = [response.event.log.text for response in told if response.event.HasField("log")]
    if low.attempt > 1:
        assert changes.count(pb.JOB_STATE_QUEUED) == low.attempt - 1
        assert any("makes room for a job of priority 5" in line for line in said)
        assert high.end_time.ToDatetime() < low.end_time.ToDatetime()
    assert losses(told) == reference
    assert low.attempt > 1


async def test_a_waiting_job_shows_its_place_and_what_it_waits_for(server, wire_config):
    wire_config.optimizer.steps = 1_000_000
    async with server(max_concurrent_jobs=1) as stub:
        await submit_at(stub, wire_config, "first", 0)
        async for told in stub.WatchTrainingJob(pb.WatchTrainingJobRequest(id="first")):
            if told.event.HasField("metrics"):
                break
        await submit_at(stub, wire_config, "third", -2)
        await submit_at(stub, wire_config, "second", -1)
        await until(lambda: get(stub, "second"), lambda job: job.queue_position == 1)
        await until(lambda: get(stub, "third"), lambda job: job.queue_position == 2)
        listed = (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs
        waiting = {job.id: job.waiting_for for job in listed}
    assert "ATTN_TRAIN_JOBS" in waiting["second"]
    assert waiting["third"] == "waits for the jobs before it"
    assert waiting["first"] == ""


@pytest.mark.parametrize("priority", [-101, 101])
async def test_a_priority_out_of_range_is_refused(server, wire_config, priority):
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="-100 to 100") as caught:
            await submit_at(stub, wire_config, "job", priority)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
