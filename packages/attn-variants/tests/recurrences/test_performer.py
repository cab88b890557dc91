"""Random features estimate softmax attention, and keep doing so however far the numbers go."""

import math
from itertools import pairwise

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import InvalidValue, WrongState
from attn_variants.mechanisms import linear_layers as favor
from attn_variants.mechanisms.linear_layers import independent, orthogonal
from torch import nn

SIZE = 8


def estimates(features, draws, draw=orthogonal, pairs=4):
    """Estimates [draws, pairs] of e^(q·k/√d) of some pairs, and the exact values [pairs], float64."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(pairs, SIZE, generator=generator, dtype=torch.float64) / 2 for _ in range(2))
    found = []
    for _ in range(draws):
        directions = draw(features, SIZE, generator).double()
        logs = favor.log_features(query, directions) + favor.log_features(key, directions)
        found.append(logs.exp().mean(-1))
    return torch.stack(found), ((query * key).sum(-1) / math.sqrt(SIZE)).exp()


def test_cl_12_the_mean_over_many_draws_is_the_exponential_kernel():
    found, exact = estimates(features=64, draws=1500)
    error = found.mean(0) - exact
    spread = found.std(0) / math.sqrt(len(found))
    assert (error.abs() < 4 * spread).all()
    assert (spread < 0.02 * exact).all()


def test_cl_12_orthogonal_directions_vary_less_than_independent_ones():
    varied = [estimates(SIZE, 1500, draw)[0].var(0).mean() for draw in (orthogonal, independent)]
    assert varied[0] < 0.95 * varied[1]


def test_cl_12_the_error_falls_with_the_number_of_features():
    errors = []
    for features in (16, 64, 256, 1024):
        found, exact = estimates(features, draws=200)
        errors.append((found / exact - 1).square().mean().sqrt())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 4


@pytest.mark.parametrize(("features", "size"), [(1, 4), (4, 4), (6, 4), (9, 4), (3, 1)])
def test_directions_are_orthogonal_within_blocks_and_as_long_as_gaussian_ones(features, size):
    torch.manual_seed(0)
    directions = orthogonal(features, size)
    assert directions.shape == (features, size)
    for block in directions.split(size):
        products = block @ block.T
        torch.testing.assert_close(products, torch.diag(products.diagonal()), rtol=1e-4, atol=1e-4)
    lengths = orthogonal(4000, size).square().sum(-1)
    assert lengths.mean().item() == pytest.approx(size, rel=0.1)


def made(**options):
    torch.manual_seed(0)
    mechanism = installed().mechanisms.get("performer")
    shared = {"hidden_size": 16, "num_heads": 2, **{name: options.pop(name) for name in ("causal",) if name in options}}
    return mechanism.build(configure(mechanism, options, **shared)).double()


def exact(layer, rows):
    """Softmax attention with the layer's projections."""
    query, key, value = (
        linear(rows).unflatten(-1, (2, SIZE)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)
    )
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=layer.causal)
    return layer.output(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("causal", [True, False])
def test_cl_12_with_many_features_the_layer_is_softmax_attention(causal):
    rows = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 3
    errors = []
    for features in (16, 4096):
        layer = made(features=features, causal=causal)
        errors.append((layer(rows) - exact(layer, rows)).abs().mean().item())
    assert errors[1] < errors[0] / 4
    assert errors[1] < 0.03


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_each_row_of_the_causal_form_is_the_last_of_its_prefix_at_any_size_of_inputs(size):
    causal, full = made(features=12, chunk=4), made(features=12, causal=False)
    full.load_state_dict(causal.state_dict())
    rows = size * torch.randn(1, 11, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out = causal(rows)
    assert torch.isfinite(out).all()
    for length in range(1, 12):
        prefix = full(rows[:, :length])[:, -1]
        torch.testing.assert_close(out[:, length - 1], prefix, rtol=1e-9, atol=1e-9)


def test_the_first_token_sees_itself_only():
    layer = made(features=5)
    rows = 100 * torch.randn(1, 1, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(rows), layer.output(layer.value(rows)))


def test_a_redraw_changes_the_directions_in_training_and_is_refused_in_evaluation():
    layer = made(features=5).train()
    before = layer.projection.clone()
    layer.redraw(torch.Generator().manual_seed(3))
    assert not torch.equal(layer.projection, before)
    frozen = layer.eval().projection.clone()
    with pytest.raises(WrongState, match="evaluation mode"):
        layer.redraw()
    assert torch.equal(layer.projection, frozen)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_training_draws_new_directions_after_every_so_many_updates_and_a_pass_never(kernel):
    layer, rows = made(features=5, redraw=2, kernel=kernel).train(), torch.randn(1, 4, 16, dtype=torch.float64)
    seen = [layer.projection.clone()]
    for _ in range(4):
        layer(rows)
        assert torch.equal(layer.projection, seen[-1])
        layer.after_update(lambda value: value)
        seen.append(layer.projection.clone())
    assert [torch.equal(before, after) for before, after in pairwise(seen)] == [True, False, True, False]


def test_a_saved_layer_draws_when_the_first_would_have():
    first, second = made(features=5, redraw=3).train(), made(features=5, redraw=3).train()
    for _ in range(2):
        first.after_update(lambda value: value)
    second.load_state_dict(first.state_dict())
    for layer in (first, second):
        torch.manual_seed(5)
        layer.after_update(lambda value: value)
    assert torch.equal(first.projection, second.projection)
    assert not torch.equal(first.projection, made(features=5, redraw=3).projection)


def test_the_directions_are_saved_and_are_no_weights():
    layer = made(features=5)
    assert "projection" in layer.state_dict()
    assert "projection" not in dict(layer.named_parameters())


def test_by_default_a_head_of_size_d_has_d_ln_d_features():
    assert made().projection.shape == (int(SIZE * math.log(SIZE)), SIZE)


@pytest.mark.parametrize(
    ("option", "value"), [("kernel", "cosine"), ("features", 0), ("epsilon", 0.0), ("epsilon", -1)]
)
def test_options_that_cannot_be_are_refused_by_name(option, value):
    with pytest.raises(InvalidValue, match=option):
        made(**{option: value})
