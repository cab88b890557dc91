"""Sigmoid, softmax off by one and learned sinks."""

import math

import pytest
import torch
from attn_variants.distributions import sigmoid, softmax, softmax_with_sink


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_a_sink_is_one_more_key_whose_value_is_zero():
    scores, logit = doubles(5, 7), doubles(5, 1)
    expected = softmax(torch.cat([scores, logit], dim=-1), None)[..., :-1]
    assert torch.allclose(softmax_with_sink(scores, None, logit), expected, rtol=0, atol=1e-15)


def test_softmax_off_by_one_is_a_sink_of_logit_zero(build, agrees):
    one, sink = build("softmax_one", hidden_size=16, num_heads=4), build("sink", hidden_size=16, num_heads=4)
    sink.load_state_dict({**one.state_dict(), "distribution.logit": torch.zeros(4, dtype=torch.float64)})
    agrees("softmax_one", identity="a sink of logit 0").functions(one, sink, doubles(2, 6, 16), tolerance=1e-13)


def test_a_sink_without_weight_is_softmax(build, agrees):
    sink, mha = build("sink", hidden_size=16, num_heads=4), build("mha", hidden_size=16, num_heads=4)
    state = mha.state_dict()
    sink.load_state_dict({**state, "distribution.logit": torch.full((4,), -1e4, dtype=torch.float64)})
    agrees("sink", identity="a sink without weight is mha").functions(sink, mha, doubles(2, 6, 16), tolerance=1e-13)


@pytest.mark.parametrize("largest", [800.0, -800.0])
def test_neither_large_nor_small_scores_overflow(largest):
    scores = torch.full((3,), largest, dtype=torch.float64)
    weights = softmax_with_sink(scores, None, torch.zeros((), dtype=torch.float64))
    assert torch.allclose(weights, torch.full((3,), 1 / 3 if largest > 0 else 0.0, dtype=torch.float64))


def test_sigmoid_weighs_every_key_alone_by_the_closed_form(agrees):
    scores = doubles(4, 6)
    allowed = torch.ones(4, 6, dtype=torch.bool).tril()
    expected = [[1 / (1 + (i + 1) * math.exp(-scores[i, j])) if j <= i else 0.0 for j in range(6)] for i in range(4)]
    closed = agrees("sigmoid", paper="the closed form, pair by pair")
    closed.outputs(sigmoid(scores, allowed), torch.tensor(expected, dtype=torch.float64), 1e-15)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["sink", "softmax_one"])
def test_the_sink_is_that_of_gpt_oss_in_transformers(build, agrees, name):
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    layer = build(name, hidden_size=32, num_heads=4, num_kv_heads=2)
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    if name == "sink":
        torch.nn.init.normal_(layer.distribution.logit)
        sinks.data.copy_(layer.distribution.logit)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, sinks
    module.training = False
    mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)[None, None]

    def theirs(rows):
        query, key, value = (part.transpose(1, 2) for part in layer.project(rows, None))
        return layer.output(eager_attention_forward(module, query, key, value, mask, scaling=8**-0.5)[0].flatten(-2))

    pairs = [(layer.distribution.logit, sinks)] if name == "sink" else []
    oracle = agrees(name, package="transformers GptOss eager_attention_forward")
    oracle.functions(layer, theirs, doubles(2, 6, 32), weights=pairs, tolerance=1e-13)
