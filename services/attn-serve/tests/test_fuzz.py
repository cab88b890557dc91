"""Whatever a request says, the server answers it in its own words, and goes on."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from asking_inference import ask as asking
from asking_inference import complete, drained
from attn.v1 import model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from fuzzing import RequestFuzzer, fuzz

COUNT = 2000
MODELS = ("tiny", "tiny-linear")
TOGETHER = 300
"""Calls of a connection at a time: more than it may run."""


@pytest.mark.timeout(600)
async def test_no_request_is_answered_with_a_fault_of_the_server(
    channel: grpc.aio.Channel, stub: InferenceServiceStub, models: Any
) -> None:
    await models.LoadModel(model_pb2.LoadModelRequest(name="tiny-linear"))
    before = await complete(stub, asking(max_new_tokens=20))
    ended, faults = await fuzz(channel, seed=1, count=COUNT, together=TOGETHER, models=MODELS)
    assert not faults, "\n".join(faults[:5])
    assert ended["OK"] >= COUNT * 0.45
    assert ended["meant valid"] >= COUNT / 2
    assert ended["INVALID_ARGUMENT"] >= COUNT / 20
    for model in ("tiny", "tiny-linear"):
        load = await drained(stub, model)
        assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)
    assert await complete(stub, asking(max_new_tokens=20)) == before


def test_equal_seeds_draw_equal_requests_of_which_most_are_valid() -> None:
    first, second = ([RequestFuzzer(7, MODELS).next() for _ in range(1)] for _ in range(2))
    assert first == second
    fuzzer = RequestFuzzer(3, MODELS)
    valid = sum(fuzzer.next()[2] for _ in range(1000))
    assert valid > 500
