"""Jobs belong to the tenant whose token submitted them; to other tenants they do not exist."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from attn.v1 import training_pb2 as pb
from attn_gateway.records import ArtifactStore, Database, ModelRecord, ModelRecords, database_url


async def test_a_job_of_one_tenant_does_not_exist_for_another(shared, by, home, tmp_path, wire_config, monkeypatch):
    monkeypatch.setenv("ATTN_ARTIFACTS", f"file://{tmp_path}/store")
    async with shared() as stub:
        request = pb.SubmitTrainingJobRequest(job_id="anns", config=wire_config)
        await stub.SubmitTrainingJob(request, **by("one"))

        async def ids(token: str) -> list[str]:
            answer = await stub.ListTrainingJobs(pb.ListTrainingJobsRequest(), **by(token))
            return [job.id for job in answer.jobs]

        assert (await ids("one"), await ids("two"), await ids("op")) == (["anns"], [], ["anns"])
        told = set()
        for job_id in ("anns", "nothing"):
            for call in (
                lambda job_id=job_id: stub.GetTrainingJob(pb.GetTrainingJobRequest(id=job_id), **by("two")),
                lambda job_id=job_id: stub.CancelTrainingJob(pb.CancelTrainingJobRequest(id=job_id), **by("two")),
                lambda job_id=job_id: stub.ResumeTrainingJob(pb.ResumeTrainingJobRequest(id=job_id), **by("two")),
                lambda job_id=job_id: stub.WatchTrainingJob(pb.WatchTrainingJobRequest(id=job_id), **by("two")).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call()
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
                told.add(caught.value.details().replace(job_id, "ID"))
        assert len(told) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SubmitTrainingJob(request, **by("two"))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "ann" not in caught.value.details().split()
        watched = stub.WatchTrainingJob(pb.WatchTrainingJobRequest(id="anns"), **by("op"))
        assert [answer async for answer in watched]
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="anns"), **by("one"))).job
        assert done.state == pb.JOB_STATE_SUCCEEDED
        # Its model is hers as well, also as the base of another, and servers on other machines find it.
        wire_config.model.base_model = "anns"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SubmitTrainingJob(pb.SubmitTrainingJobRequest(config=wire_config), **by("two"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with Database(database_url(home)) as database:
        assert ModelRecords(database).find("anns") == ModelRecord("anns", "ann", artifact="anns")
    fetched = ArtifactStore(f"file://{tmp_path}/store", tmp_path / "elsewhere").fetch("anns")
    assert (fetched / "config.json").read_bytes() == (home / "models" / "anns" / "config.json").read_bytes()
