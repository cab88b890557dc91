"""Mixtures of experts through a real gateway."""

from __future__ import annotations

import grpc
import pytest
from attn.v1 import training_pb2 as pb
from attn_models.decoder.config import Experts
from attn_models.loading import load_model


async def test_a_mixture_of_experts_is_trained_as_it_was_asked_for(server, wire_spec, submit, watch):
    wire_spec.model.experts, wire_spec.model.experts_per_token = 4, 2
    wire_spec.model.routing, wire_spec.model.balance = "switch", 0.25
    async with server() as stub:
        job = await submit(stub, wire_spec, "mixture")
        said = job.spec.model
        assert (said.experts, said.experts_per_token, said.routing, said.balance) == (4, 2, "switch", 0.25)
        await watch(stub, "mixture")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="mixture"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED
    # The loss that is lowered holds a quarter of an imbalance near 1; the validation loss is of the text alone.
    assert done.last_metrics["loss"] > done.last_metrics["validation_loss"]
    config = load_model(done.model_path).config
    assert config.mixture == Experts(count=4, per_token=2)
    assert (config.routing, config.balance) == ("switch", 0.25)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"experts": 4}, "experts_per_token: None is not allowed; allowed: a whole number from 1 to the 4 experts"),
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token: 5"),
        ({"experts_per_token": 2}, "experts: .*a number of experts"),
        ({"balance": 0.1}, "experts: .*a number of experts"),
    ],
)
async def test_half_a_mixture_is_refused_with_what_is_missing(server, wire_spec, submit, given, named):
    for field, value in given.items():
        setattr(wire_spec.model, field, value)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=named) as caught:
            await submit(stub, wire_spec, "bad")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
