"""Mixtures of experts, and fields of a decoder that have none of their own on the wire, through a real gateway."""

from __future__ import annotations

import grpc
import pytest
from attn.v1 import training_pb2 as pb
from attn_models.loading import load_model
from attn_schema.codec import from_message
from attn_schema.training import ModelConfig


async def test_a_mixture_of_experts_is_trained_as_it_was_asked_for(server, wire_config, submit, watch):
    wire_config.model.num_experts, wire_config.model.num_experts_per_tok = 4, 2
    wire_config.model.routing, wire_config.model.router_aux_loss_coef = "switch", 0.25
    async with server() as stub:
        job = await submit(stub, wire_config, "mixture")
        said = job.config.model
        assert (said.num_experts, said.num_experts_per_tok, said.routing, said.router_aux_loss_coef) == (
            4,
            2,
            "switch",
            0.25,
        )
        await watch(stub, "mixture")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="mixture"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED
    # The loss that is lowered holds a quarter of an imbalance near 1; the validation loss is of the text alone.
    assert done.last_metrics["loss"] > done.last_metrics["validation_loss"]
    config = load_model(done.model_path).config
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)
    assert (config.routing, config.router_aux_loss_coef) == ("switch", 0.25)


def set_fields(model: pb.ModelConfig, values: dict) -> None:
    """Set fields of a family's config."""
    for name, value in values.items():
        if name == "options":
            model.options.update(value)
        elif name in model.DESCRIPTOR.fields_by_name:
            setattr(model, name, value)
        else:
            model.model_options.update({name: value})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"num_experts": 4},
            "num_experts_per_tok: None is not allowed; allowed: a whole number from 1 to the 4 experts",
        ),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok: 5"),
        ({"num_experts_per_tok": 2}, "num_experts: .*a number of experts"),
        ({"router_aux_loss_coef": 0.1}, "num_experts: .*a number of experts"),
    ],
)
async def test_half_a_mixture_is_refused_with_what_is_missing(server, wire_config, submit, given, named):
    for field, value in given.items():
        setattr(wire_config.model, field, value)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=named) as caught:
            await submit(stub, wire_config, "bad")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_further_fields_of_a_decoder_are_trained_as_they_were_asked_for(server, wire_config, submit, watch):
    wire_config.model.num_layers = 2
    wire_config.model.num_experts, wire_config.model.num_experts_per_tok, wire_config.model.routing = (
        4,
        2,
        "deepseek_v3",
    )
    others = {
        "kv_sharing": "cla:2",
        "n_shared_experts": 1,
        "router_bias_update_rate": 0.01,
        "num_nextn_predict_layers": 1,
        "attention_dropout": 0.25,
    }
    set_fields(wire_config.model, others | {"nextn_predict_loss_weight": 2.0})
    async with server() as stub:
        job = await submit(stub, wire_config, "others")
        assert (
            from_message(ModelConfig, job.config.model).config_fields().items()
            >= (others | {"nextn_predict_loss_weight": 2.0}).items()
        )
        await watch(stub, "others")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="others"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED
    assert done.last_metrics["loss"] > 2 * done.last_metrics["validation_loss"]  # of two tokens, the later doubled
    config = load_model(done.model_path).config
    assert {name: getattr(config, name) for name in others} == others


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_sharing": "cla:0"}, "kv_sharing"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"attention_dropout": float("nan")}, "attention_dropout: nan"),
        ({"n_shared_experts": float("nan")}, "NaN or an infinite number"),
        ({"attention_dropout": 0.1, "pattern": ["retnet"]}, "without attention weights"),
        ({"shared_expert": 1}, "did you mean 'n_shared_experts'"),
        ({"vocab_size": 9}, "model_options: .*vocab_size"),
        ({"others": {"hidden_size": 3}}, "others"),
        ({"pattern": [{"mechanism": "nothing"}]}, "unknown mechanism 'nothing'"),
    ],
)
async def test_further_fields_that_a_decoder_has_not_are_refused(server, wire_config, submit, given, named):
    set_fields(wire_config.model, given)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=named) as caught:
            await submit(stub, wire_config, "bad")
        assert caught.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
