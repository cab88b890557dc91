"""Jobs through a real gateway: submitted, watched, stopped, resumed."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import pytest
import torch
from attn.v1 import training_pb2 as pb
from attn_models.export import export_model
from attn_models.loading import load_model
from attn_models.weights.manifest import TRAINING, read_source
from grpc_status import rpc_status


async def until(stub, job_id, states, seconds=60):
    """The job once it is in one of `states`."""
    async with asyncio.timeout(seconds):
        while True:
            job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id=job_id))).job
            if job.state in states:
                return job
            await asyncio.sleep(0.02)


async def until_step(stub, job_id, step):
    async for response in stub.WatchTrainingJob(pb.WatchTrainingJobRequest(id=job_id)):
        if response.event.HasField("metrics") and response.event.metrics.step >= step:
            return response.event
    raise AssertionError("the job ended before")


def losses(responses):
    metrics = [response.event.metrics for response in responses if response.event.HasField("metrics")]
    return {item.step: item.values["loss"] for item in metrics if "loss" in item.values}


async def test_a_job_is_watched_to_its_end_and_leaves_a_model(server, wire_config, submit, watch, home):
    async with server() as stub:
        job = await submit(stub, wire_config, "first")
        assert job.state == pb.JOB_STATE_QUEUED
        assert job.config.optimizer.min_learning_rate == pytest.approx(1e-3)
        responses = await watch(stub, "first")
        assert responses[0].job.id == "first"
        events = [response.event for response in responses[1:] if response.HasField("event")]
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        states = [event.state_change for event in events if event.HasField("state_change")]
        assert all(before.current == after.previous for before, after in pairwise(states))
        assert [change.current for change in states] == [
            pb.JOB_STATE_STARTING,
            pb.JOB_STATE_RUNNING,
            pb.JOB_STATE_SUCCEEDED,
        ]
        assert [event.checkpoint.step for event in events if event.HasField("checkpoint")] == [10, 20]
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="first"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED
    assert (done.step, done.attempt, done.last_event_id) == (20, 1, len(events))
    assert done.last_metrics["validation_loss"] > 0
    assert done.model_path == str(home / "models" / "first")
    trained = read_source(home / "models" / "first")[TRAINING]
    assert trained["steps"] == 20
    assert trained["validation_loss"] == pytest.approx(done.last_metrics["validation_loss"], abs=1e-4)
    assert export_model(home / "models" / "first", home / "exported").layout in ("llama", "gpt2")
    loaded = load_model(done.model_path)
    ids = torch.tensor([loaded.tokenizer.encode("query value")[:8]])
    with torch.inference_mode():
        assert loaded.model(ids).shape == (1, 8, loaded.tokenizer.vocab_size)


async def test_a_watcher_goes_on_from_any_event_and_misses_none(server, wire_config, submit, watch):
    async with server() as stub:
        await submit(stub, wire_config, "job")
        whole = [response.event for response in (await watch(stub, "job"))[1:]]
        for after in (0, 1, len(whole) - 1, len(whole)):
            rest = [response.event for response in (await watch(stub, "job", after))[1:]]
            assert rest == whole[after:]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(stub, "job", len(whole) + 1)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_many_watchers_see_the_same_and_one_that_leaves_disturbs_nobody(server, wire_config, submit, watch):
    async with server() as stub:
        await submit(stub, wire_config, "job")
        leaver = stub.WatchTrainingJob(pb.WatchTrainingJobRequest(id="job"))
        await leaver.read()
        leaver.cancel()
        seen = await asyncio.gather(*(watch(stub, "job") for _ in range(8)))
    events = [[response.event for response in responses if response.HasField("event")] for responses in seen]
    assert all(found == events[0] for found in events)


async def test_a_repeated_submission_is_one_job_and_another_content_is_refused(server, wire_config, submit):
    async with server() as stub:
        first = await submit(stub, wire_config, "same")
        again = await submit(stub, wire_config, "same")
        assert (again.id, again.create_time) == (first.id, first.create_time)
        wire_config.seed += 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config, "same")
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        await until(stub, "same", [pb.JOB_STATE_SUCCEEDED])
        wire_config.seed -= 1
        finished = await submit(stub, wire_config, "same")
        assert finished.state == pb.JOB_STATE_SUCCEEDED


async def test_a_cancelled_job_stops_with_a_checkpoint_and_resumes_with_bit_equal_losses(
    server, wire_config, submit, watch
):
    wire_config.optimizer.steps = 400
    wire_config.checkpoint.save_steps = 150
    async with server() as stub:
        await submit(stub, wire_config, "undisturbed")
        reference = losses(await watch(stub, "undisturbed"))
        await submit(stub, wire_config, "stopped")
        await until_step(stub, "stopped", 20)
        asked = (await stub.CancelTrainingJob(pb.CancelTrainingJobRequest(id="stopped"))).job
        assert asked.state in (pb.JOB_STATE_CANCELLING, pb.JOB_STATE_CANCELLED)
        first = await watch(stub, "stopped")
        job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="stopped"))).job
        assert job.state == pb.JOB_STATE_CANCELLED
        assert 20 <= job.latest_checkpoint.step < 400
        resumed = (await stub.ResumeTrainingJob(pb.ResumeTrainingJobRequest(id="stopped"))).job
        assert (resumed.state, resumed.attempt) == (pb.JOB_STATE_QUEUED, 2)
        second = await watch(stub, "stopped", first[-1].event.id)
    assert losses(first) | losses(second) == reference
    assert min(losses(second)) > job.latest_checkpoint.step
    assert losses(first).keys().isdisjoint(losses(second).keys())


async def test_discarding_leaves_the_checkpoints_as_they_are(server, wire_config, submit):
    wire_config.optimizer.steps = 100_000
    async with server() as stub:
        await submit(stub, wire_config, "job")
        await until_step(stub, "job", 40)
        await stub.CancelTrainingJob(pb.CancelTrainingJobRequest(id="job", discard=True))
        job = await until(stub, "job", [pb.JOB_STATE_CANCELLED])
    assert job.latest_checkpoint.step % 10 == 0


async def test_jobs_wait_for_room_and_a_waiting_job_can_be_cancelled(server, wire_config, submit):
    endless = pb.TrainingConfig()
    endless.CopyFrom(wire_config)
    endless.optimizer.steps = 1_000_000
    async with server(max_concurrent_jobs=1) as stub:
        await submit(stub, endless, "first")
        await submit(stub, wire_config, "second")
        await submit(stub, wire_config, "third")
        await until(stub, "first", [pb.JOB_STATE_RUNNING])
        third = (await stub.CancelTrainingJob(pb.CancelTrainingJobRequest(id="third"))).job
        assert third.state in (pb.JOB_STATE_CANCELLING, pb.JOB_STATE_CANCELLED)
        await until(stub, "third", [pb.JOB_STATE_CANCELLED])
        second = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="second"))).job
        assert second.state == pb.JOB_STATE_QUEUED
        await stub.CancelTrainingJob(pb.CancelTrainingJobRequest(id="first", discard=True))
        await until(stub, "second", [pb.JOB_STATE_SUCCEEDED])


async def test_jobs_survive_the_server_and_go_on_by_themselves_when_it_starts_again(server, wire_config, submit, watch):
    wire_config.optimizer.steps = 300
    async with server() as stub:
        await submit(stub, wire_config, "undisturbed")
        reference = losses(await watch(stub, "undisturbed"))
        await submit(stub, wire_config, "job")
        await until_step(stub, "job", 30)
    async with server() as stub:
        listed = (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs
        assert [job.id for job in listed] == ["job", "undisturbed"]
        assert losses(await watch(stub, "job")) == reference
        job = await until(stub, "job", [pb.JOB_STATE_SUCCEEDED])
        assert job.attempt == 2


async def test_final_jobs_stay_as_they_are(server, wire_config, submit, watch):
    async with server() as stub:
        await submit(stub, wire_config, "job")
        await watch(stub, "job")
        before = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="job"))).job
        after = (await stub.CancelTrainingJob(pb.CancelTrainingJobRequest(id="job"))).job
        assert after == before
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ResumeTrainingJob(pb.ResumeTrainingJobRequest(id="job"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_job_that_fails_says_why_with_a_reason_for_programs(server, wire_config, submit, watch):
    wire_config.optimizer.learning_rate = 1e30
    wire_config.optimizer.max_grad_norm = 0
    async with server() as stub:
        await submit(stub, wire_config, "job")
        await watch(stub, "job")
        job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="job"))).job
    assert job.state == pb.JOB_STATE_FAILED
    assert "loss" in job.error.message
    assert job.error.reason == "TRAINING_DIVERGED"


async def test_pages_of_jobs_are_stable_while_jobs_come(server, wire_config, submit):
    async with server(max_concurrent_jobs=1) as stub:
        wire_config.optimizer.steps = 1_000_000
        for name in "abc":
            await submit(stub, wire_config, name)
        first = await stub.ListTrainingJobs(pb.ListTrainingJobsRequest(page_size=2))
        await submit(stub, wire_config, "d")
        request = pb.ListTrainingJobsRequest(page_size=2, page_token=first.next_page_token)
        second = await stub.ListTrainingJobs(request)
        for name in "abcd":
            await stub.CancelTrainingJob(pb.CancelTrainingJobRequest(id=name, discard=True))
    assert [job.id for job in first.jobs] == ["c", "b"]
    assert [job.id for job in second.jobs] == ["a"]
    assert second.next_page_token == ""


async def test_an_unknown_job_is_not_found_with_near_names(server, wire_config, submit):
    async with server() as stub:
        await submit(stub, wire_config, "gqa-small")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="gqa-smal"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "gqa-small" in caught.value.details()
    assert rpc_status.from_call(caught.value) is not None
