"""Luong's local attention, local-m and local-p."""

import math

import pytest
import torch
from attn_variants.distributions import around

WIDTH = 8


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def local_p_by_loops(layer, rows, source, radius):
    """Section 3.2 of the paper, one pair at a time, in one head."""
    spec = layer.spec.heads
    query = layer.query(rows).unflatten(-1, (spec.query, spec.key_size))
    key, value = (part(source).unflatten(-1, (spec.query, spec.key_size)) for part in (layer.key, layer.value))
    weight, vector = layer.distribution.weight, layer.distribution.vector
    out = []
    for t in range(len(rows)):
        for h in range(spec.query):
            place = len(source) * torch.sigmoid(vector[h] @ torch.tanh(query[t, h] @ weight[h]))
            near = [s for s in range(len(source)) if abs(s - place) <= radius]
            align = torch.softmax(torch.stack([query[t, h] @ layer.score.weight[h] @ key[s, h] for s in near]), 0)
            deviation = radius / 2
            out.append(
                sum(
                    a * torch.exp(-((s - place) ** 2) / (2 * deviation**2)) * value[s, h]
                    for a, s in zip(align, near, strict=True)
                )
            )
    return layer.output(torch.stack(out).view(len(rows), -1))


def test_golden_weights_around_four_and_a_fifth(agrees):
    scores = torch.zeros(1, 1, 1, 10, dtype=torch.float64)
    centre = torch.full((1, 1, 1, 1), 4.2, dtype=torch.float64)
    weights = around(2, scores, None, centre, torch.arange(10)[None, None, None])[0, 0, 0]
    expected = torch.tensor([0, 0, 0, 0.1217, 0.2450, 0.1815, 0.0495, 0, 0, 0], dtype=torch.float64)
    agrees("local_p", paper="golden weights around 4.2").outputs(weights, expected, 5e-5)
    assert math.isclose(weights.sum().item(), 0.5977, abs_tol=5e-5)


def test_local_p_is_the_equations_of_the_paper_forward_and_backward(build, agrees):
    layer = build("local_p", {"radius": 2}, hidden_size=WIDTH, num_heads=2)
    torch.nn.init.normal_(layer.distribution.vector)
    rows, source, upstream = doubles(4, WIDTH), doubles(9, WIDTH), doubles(4, WIDTH)
    found, expected = layer(rows[None], source[None])[0], local_p_by_loops(layer, rows, source, 2)
    loops = agrees("local_p", paper="section 3.2 in loops")
    loops.outputs(found, expected, 1e-13)
    weights = list(layer.parameters())
    ours, theirs = (torch.autograd.grad((out * upstream).sum(), weights) for out in (found, expected))
    loops.gradients(ours, theirs, 1e-12)


def test_padding_does_not_move_the_place_that_a_query_names(build):
    layer = build("local_p", {"radius": 2}, hidden_size=WIDTH, num_heads=2)
    rows, source = doubles(1, 3, WIDTH), doubles(1, 9, WIDTH)
    key_padding_mask = torch.arange(9)[None] < 6
    assert torch.allclose(
        layer(rows, source, key_padding_mask=key_padding_mask), layer(rows, source[:, :6]), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("real", [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0, 1, 1]], ids=["before", "between"])
def test_padding_anywhere_leaves_the_weights_of_the_real_keys(build, real):
    layer = build("local_p", {"radius": 2}, hidden_size=WIDTH, num_heads=2)
    rows, source, real = doubles(1, 3, WIDTH), doubles(1, 9, WIDTH), torch.tensor([real]).bool()
    padded, alone = layer.weights(rows, source, key_padding_mask=real), layer.weights(rows, source[:, real[0]])
    assert torch.allclose(padded[..., real[0]], alone, rtol=0, atol=1e-14)
    assert (padded[..., ~real[0]] == 0).all()
    assert alone.sum() > 0.1


def test_a_source_shorter_than_the_window_is_met_whole(build):
    layer = build("local_p", {"radius": 10}, hidden_size=WIDTH, num_heads=1)
    assert (layer.weights(doubles(1, 3, WIDTH), doubles(1, 4, WIDTH)) > 0).all()
    assert (layer.weights(doubles(1, 3, WIDTH), doubles(1, 1, WIDTH)) > 0).all()


def test_local_m_sees_the_window_around_its_own_position_and_nothing_far_behind_the_source(build):
    layer = build("local_m", {"radius": 2, "score": "dot"}, hidden_size=WIDTH, num_heads=1)
    weights = layer.weights(doubles(1, 12, WIDTH), doubles(1, 6, WIDTH))[0, 0]
    seen = [(row > 0).nonzero().flatten().tolist() for row in weights]
    assert seen == [[s for s in range(6) if abs(s - t) <= 2] for t in range(12)]


def test_a_radius_as_long_as_the_source_is_global_attention(build, agrees):
    local, whole = (
        build("local_m", {"radius": 20}, hidden_size=WIDTH, num_heads=2),
        build("luong", hidden_size=WIDTH, num_heads=2),
    )
    whole.load_state_dict(local.state_dict())
    rows, source = doubles(1, 4, WIDTH), doubles(1, 7, WIDTH)
    same = agrees("local_m", identity="a radius as long as the source is luong")
    same.functions(local, whole, rows, source, tolerance=1e-13)
