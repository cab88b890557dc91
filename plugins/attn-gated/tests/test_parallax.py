"""Parallax beside the plain torch function of fla-core, and what only it guarantees."""

import importlib.metadata
import importlib.util

import pytest
import torch
from attn_core import Rotary, configure, installed
from attn_gated.parallax import Parallax
from attn_testing import Agreement, MechanismLaws
from attn_testing.float64 import in_float64

PARALLAX = Parallax()


class TestParallax(MechanismLaws):
    mechanism = "parallax"


def built(**settings):
    torch.manual_seed(0)
    return PARALLAX.build(configure(PARALLAX, {}, hidden_size=32, num_heads=4, num_kv_heads=2, **settings))


@pytest.mark.oracle
def test_it_is_that_of_fla(record_property):
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/parallax/naive.py")
    found = importlib.util.spec_from_file_location("fla_naive_parallax", path)
    peer = importlib.util.module_from_spec(found)
    found.loader.exec_module(peer)
    layer = built()

    def theirs(rows):
        parts = (layer.query(rows), layer.inner.second(rows), layer.key(rows), layer.value(rows))
        out = peer.naive_parallax(*(part.unflatten(-1, (-1, 8)) for part in parts))
        return layer.output(out.flatten(-2))

    same = Agreement(record_property, "parallax", package="fla-core naive_parallax")
    learned = [(weight, weight) for weight in layer.parameters()]
    same.functions(layer, theirs, torch.randn(2, 20, 32), tolerance=1e-4, weights=learned)


@pytest.mark.parametrize("interleaved", [False, True])
def test_second_queries_turn_as_queries_do(interleaved):
    """With the weights of the first, they are the first, unscaled."""
    with in_float64():
        layer = built(rotary=Rotary(fraction=0.5, interleaved=interleaved))
        layer.inner.second.load_state_dict(layer.query.state_dict())
        rows, seen = torch.randn(2, 9, 32), []
        layer.inner.forward = lambda hidden, operands, attend: (
            seen.append((operands.query.transpose(1, 2), layer.inner._parts(hidden, operands)[0][1]))
            or operands.query
        )  # fmt: skip
        layer(rows)
    torch.testing.assert_close(seen[0][0], seen[0][1])


def test_without_second_queries_it_is_softmax_attention(record_property):
    layer, gqa = built().double(), installed().mechanisms.get("gqa")
    plain = gqa.build(configure(gqa, {}, hidden_size=32, num_heads=4, num_kv_heads=2)).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.nn.init.zeros_(layer.inner.second.weight)
    rows = torch.randn(2, 20, 32, dtype=torch.float64)
    same = Agreement(record_property, "parallax", identity="without second queries gqa")
    same.outputs(layer(rows), plain(rows), 1e-12)


def test_weights_sum_to_one_and_some_are_negative():
    layer = built()
    torch.nn.init.normal_(layer.inner.second.weight, std=1.0)
    weights = layer.weights(torch.randn(2, 20, 32))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 20), rtol=1e-4, atol=1e-4)
    assert (weights < 0).any()


def test_pieces_of_queries_equal_the_whole(monkeypatch):
    layer, rows = built().double(), torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    whole = layer(rows)
    expected = torch.autograd.grad(whole.square().sum(), rows)[0]
    monkeypatch.setattr("attn_gated.parallax.correction.PIECE", 1000)
    torch.testing.assert_close(layer(rows), whole)
    torch.testing.assert_close(torch.autograd.grad(layer(rows).square().sum(), rows)[0], expected)
