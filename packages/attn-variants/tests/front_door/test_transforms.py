"""What stands in for torch's attention is captured and differentiated as torch's is."""

import pytest
import torch
from attn_core import Causal, Window
from attn_core.modifiers import Alibi
from attn_variants import MultiheadAttention, attend
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"attn_mask": Window(left=3) & Causal()},
    "bool": {"attn_mask": torch.ones(8, 8).tril(1).bool()},
    "bias": {"attn_mask": torch.randn(8, 8)},
    "alibi": {"modifiers": [Alibi()], "is_causal": True},
}


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("call", CALLS)
def test_a_graph_of_attention_is_whole_for_all_lengths(call):
    run = torch.compile(lambda q, k, v, **more: attend(q, k, v, **more), fullgraph=True, backend="eager")
    for batch in (2, 3):
        given = [torch.randn(batch, 4, 8, 16) for _ in range(3)]
        assert torch.equal(run(*given, **CALLS[call]), attend(*given, **CALLS[call]))


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_layer_with_exchanged_attention_is_captured_whole(training):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(training)
    layer.self_attn = MultiheadAttention(32, 4, mechanism="sparsemax").train(training)
    given, hidden = torch.randn(2, 9, 32), torch.zeros(2, 9).bool()
    hidden[1, 6:] = True
    run = torch.compile(layer, fullgraph=True, backend="eager")
    for more in ({}, {"src_key_padding_mask": hidden}, {"src_mask": torch.ones(9, 9).triu(1).bool()}):
        assert torch.allclose(run(given, **more), layer(given, **more), atol=1e-6)


@pytest.mark.parametrize("call", CALLS)
def test_tangents_are_those_of_small_differences(call):
    given, along = ([torch.randn(1, 4, 8, 16, dtype=torch.float64) for _ in range(3)] for _ in range(2))
    more = {
        name: getattr(value, "double", lambda value=value: value)() if call == "bias" else value
        for name, value in CALLS[call].items()
    }

    def run(*rows):
        return attend(*rows, **more)

    _, tangent = torch.func.jvp(run, tuple(given), tuple(along))
    step = 1e-6
    ahead, back = (run(*(g + sign * step * a for g, a in zip(given, along, strict=True))) for sign in (1, -1))
    assert torch.allclose(tangent, (ahead - back) / (2 * step), atol=1e-7)


def test_second_derivatives_are_those_of_the_formula():
    def formula(rows):
        return (torch.softmax(rows @ rows.mT / 2, dim=-1) @ rows).square().sum()

    rows = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    found = torch.func.hessian(lambda q: attend(q, q, q).square().sum())(rows)
    assert torch.allclose(found, torch.func.hessian(formula)(rows), atol=1e-10)


def test_dropping_everything_gives_zeros_that_pass_no_gradient():
    given = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    out = attend(*given, dropout_p=1.0)
    assert torch.equal(out, scaled_dot_product_attention(*given, dropout_p=1.0))
    assert not any(rows.any() for rows in torch.autograd.grad(out.sum(), given))


def test_positional_arguments_are_those_of_scaled_dot_product_attention():
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    given = query, key, value, None, 0.0, True
    assert torch.allclose(
        attend(*given, scale=0.3, enable_gqa=True),
        scaled_dot_product_attention(*given, scale=0.3, enable_gqa=True),
        atol=1e-6,
    )
