"""A job is deleted with everything that it left but its model, by its tenant, and never while it runs."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
from attn.v1 import training_pb2 as pb
from attn_gateway.records import Database, ModelRecords, database_url
from attn_gateway.records.tables import events, jobs
from attn_train.settings import Layout
from sqlalchemy import select


def delete(stub, job_id, *, cancel=False, **call):
    return stub.DeleteTrainingJob(pb.DeleteTrainingJobRequest(id=job_id, cancel=cancel), **call)


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_a_job_that_has_ended_leaves_its_model_alone(server, wire_config, submit, watch, home):
    async with server() as stub:
        await submit(stub, wire_config, "job")
        await watch(stub, "job")
        assert (home / "jobs" / "job" / "metrics.jsonl").is_file()
        kept = (await delete(stub, "job")).kept_model_path
        assert kept == str(home / "models" / "job")
        assert (Path(kept) / "model.safetensors").is_file()
        assert not list((home / "jobs").iterdir())
        assert await code_of(stub.GetTrainingJob(pb.GetTrainingJobRequest(id="job"))) is grpc.StatusCode.NOT_FOUND
        assert await code_of(delete(stub, "job")) is grpc.StatusCode.NOT_FOUND
        # The model still has the name.
        assert await code_of(submit(stub, wire_config, "job")) is grpc.StatusCode.ALREADY_EXISTS
    with Database(database_url(home)) as database, database.reading() as connection:
        assert connection.execute(select(events)).first() is None
        assert connection.execute(select(jobs)).first() is None


async def test_a_job_at_work_is_deleted_only_where_it_is_cancelled_and_its_id_begins_anew(
    server, wire_config, submit, watch, home
):
    endless = pb.TrainingConfig()
    endless.CopyFrom(wire_config)
    endless.optimizer.steps = 1_000_000
    async with server() as stub:
        await submit(stub, endless, "job")
        async for told in stub.WatchTrainingJob(pb.WatchTrainingJobRequest(id="job")):
            if told.event.HasField("checkpoint"):
                break
        assert await code_of(delete(stub, "job")) is grpc.StatusCode.FAILED_PRECONDITION
        assert (home / "jobs" / "job").is_dir()
        assert (await delete(stub, "job", cancel=True)).kept_model_path == ""
        assert not (home / "jobs" / "job").exists()
        with Database(database_url(home)) as database:
            assert ModelRecords(database).find("job") is None
        again = await submit(stub, wire_config, "job")
        assert (again.attempt, again.step) == (1, 0)
        await watch(stub, "job")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="job"))).job
        assert (done.state, done.step) == (pb.JOB_STATE_SUCCEEDED, 20)


async def test_what_an_interrupted_deletion_left_goes_when_a_server_starts(server, home):
    left = Layout(home).removed("job")
    (left / "checkpoints").mkdir(parents=True)
    kept = home / "jobs" / "other"
    kept.mkdir()
    async with server():
        assert not left.exists()
        assert kept.is_dir()


async def test_a_tenant_deletes_its_own_jobs_only(shared, by, wire_config):
    async with shared() as stub:
        await stub.SubmitTrainingJob(pb.SubmitTrainingJobRequest(job_id="anns", config=wire_config), **by("one"))
        for cancel in (False, True):
            assert await code_of(delete(stub, "anns", cancel=cancel, **by("two"))) is grpc.StatusCode.NOT_FOUND
        found = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="anns"), **by("one"))).job
        assert found.state not in (pb.JOB_STATE_CANCELLED, pb.JOB_STATE_CANCELLING)
        await delete(stub, "anns", cancel=True, **by("one"))
        answer = await stub.ListTrainingJobs(pb.ListTrainingJobsRequest(), **by("op"))
        assert not answer.jobs
