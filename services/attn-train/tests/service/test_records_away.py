"""Every call of the training service that needs the records is refused soon while they cannot be used."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from attn.v1 import training_pb2 as pb

SOON = 3.5
"""Two seconds, and what else a busy machine needs for a call."""
REFUSALS = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION}
CALLS = pb.DESCRIPTOR.services_by_name["TrainingService"].methods


def damage(home: Path, kind: str) -> None:
    path = home / "records.sqlite3"
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    if kind == "removed":
        path.unlink()
    else:
        path.write_bytes(b"")


async def code(stub, method, config: pb.TrainingConfig) -> grpc.StatusCode:
    """How a call ends, or, if it goes on for too long, DEADLINE_EXCEEDED."""
    request = getattr(pb, method.input_type.name)()
    names = {field.name for field in method.input_type.fields}
    if "id" in names:
        request.id = "job"
    if "job_id" in names:
        request.job_id = "job"
    if "config" in names:
        request.config.CopyFrom(config)
    call = getattr(stub, method.name)(request, timeout=SOON)
    if method.server_streaming:
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


@pytest.mark.parametrize("kind", ["emptied", "removed"])
async def test_calls_are_refused_soon_and_none_hangs(server, wire_config, submit, watch, home, kind) -> None:
    async with server() as stub:
        await submit(stub, wire_config, "job")
        await watch(stub, "job")
        await asyncio.to_thread(damage, home, kind)
        for method in CALLS:
            began = time.monotonic()
            try:
                found = await code(stub, method, wire_config)
            except grpc.aio.AioRpcError as failure:
                found = failure.code()
            assert found in REFUSALS, (method.name, found, time.monotonic() - began)
