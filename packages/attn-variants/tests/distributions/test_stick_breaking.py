"""A stick broken at every key, the latest first."""

import importlib.metadata
import importlib.util
import math

import pytest
import torch
from attn_core.errors import UserError
from attn_variants.distributions import broken


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def by_hand(scores, allowed):
    """Weights of one query: what is left of a stick of length one is broken at each key, from the last to the first."""
    weights, left = [0.0] * len(scores), 1.0
    for key in reversed(range(len(scores))):
        if allowed[key]:
            part = 1 / (1 + math.exp(-scores[key]))
            weights[key], left = left * part, left * (1 - part)
    return weights, left


def test_every_key_takes_its_part_of_what_later_ones_left(agrees):
    scores, allowed = doubles(6, 9), torch.rand(6, 9) < 0.7
    expected = [by_hand(row, seen)[0] for row, seen in zip(scores.tolist(), allowed.tolist(), strict=True)]
    paper = agrees("stick_breaking", paper="the stick of the paper, broken key by key in floats")
    paper.outputs(broken(scores, allowed), torch.tensor(expected, dtype=torch.float64), 1e-15)


def test_what_is_left_of_the_stick_is_what_the_weights_lack_of_one():
    scores = doubles(4, 7)
    left = [by_hand(row, [True] * 7)[1] for row in scores.tolist()]
    torch.testing.assert_close(1 - broken(scores, None).sum(-1), torch.tensor(left, dtype=torch.float64))


def test_the_layer_is_the_equation_over_all_earlier_tokens(build, agrees):
    layer = build("stick_breaking", hidden_size=12, num_heads=3)

    def theirs(rows):
        query, key, value = layer.project(rows, None)
        out = []
        for i in range(rows.shape[1]):
            left, mixed = 1.0, torch.zeros_like(query[:, i])
            for j in reversed(range(i)):
                part = torch.sigmoid((query[:, i] * key[:, j]).sum(-1, keepdim=True) / 2)
                left, mixed = left * (1 - part), mixed + left * part * value[:, j]
            out.append(mixed)
        return layer.output(torch.stack(out, 1).flatten(-2))

    agrees("stick_breaking", paper="the equation, token by token").functions(
        layer, theirs, doubles(2, 7, 12), tolerance=1e-13
    )


def test_the_nearest_of_equal_keys_takes_the_most():
    weights = broken(torch.zeros(1, 5, dtype=torch.float64), None)[0]
    assert weights.tolist() == pytest.approx([2.0**-5, 2.0**-4, 2.0**-3, 2.0**-2, 2.0**-1])


@pytest.mark.parametrize("largest", [800.0, -800.0])
def test_neither_large_nor_small_scores_overflow(largest):
    scores = torch.full((3,), largest, dtype=torch.float64, requires_grad=True)
    weights = broken(scores, None)
    assert weights.tolist() == ([0.0, 0.0, 1.0] if largest > 0 else [0.0] * 3)
    (gradient,) = torch.autograd.grad(weights.sum(), scores)
    assert gradient.isfinite().all()


def test_the_first_token_is_given_nothing(build):
    layer = build("stick_breaking", hidden_size=12, num_heads=3)
    assert not layer(doubles(1, 4, 12))[:, 0].any()


def test_looking_ahead_is_refused(build):
    with pytest.raises(UserError, match="stick_breaking"):
        build("stick_breaking", hidden_size=12, num_heads=3, causal=False)


@pytest.mark.oracle
def test_it_is_that_of_flash_linear_attention(build, agrees):
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/stickbreaking_attn/naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive_stick_breaking", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layer = build("stick_breaking", hidden_size=32, num_heads=4, num_kv_heads=2)

    def theirs(rows):
        return layer.output(module.naive_stickbreaking_attn(*layer.project(rows, None))[0].flatten(-2))

    oracle = agrees("stick_breaking", package="fla-core naive_stickbreaking_attn")
    oracle.functions(layer, theirs, doubles(2, 9, 32), tolerance=1e-13)
