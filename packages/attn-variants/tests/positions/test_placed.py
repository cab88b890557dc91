"""Positions as vectors that queries, keys, values or inputs are given."""

import itertools
import math

import networkx as nx
import pytest
import torch
from attn_core import Rotary
from attn_core.errors import Incompatible, InvalidValue

# "The old man saw a small dog yesterday": saw is the root.
SENTENCE = (2, 2, 3, -1, 6, 6, 3, 3)


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def sinusoids(place, size):
    """PE of one position, element by element (Vaswani et al. 2017, section 3.5)."""
    elements = [
        (math.cos if element % 2 else math.sin)(place / 10000 ** (2 * (element // 2) / size)) for element in range(size)
    ]
    return torch.tensor(elements, dtype=torch.float64)


def by_loops(layer, rows, place, scale):
    """Attention of rows [tokens, width], causal, one pair at a time; `place(vector, position)` places it."""
    query, key, value = (part[0] for part in layer.project(rows[None], None))
    tokens, heads, _ = query.shape
    groups = heads // key.shape[1]
    out = []
    for i, h in itertools.product(range(tokens), range(heads)):
        seen = range(i + 1)
        scores = [place(query[i, h], i) @ place(key[j, h // groups], j) * scale for j in seen]
        weights = torch.softmax(torch.stack(scores), 0)
        out.append(sum(w * place(value[j, h // groups], j) for j, w in zip(seen, weights, strict=True)))
    return layer.output(torch.stack(out).view(tokens, -1))


def added(vector, position):
    return vector + sinusoids(position, len(vector))


def behind(vector, position):
    return torch.cat([vector, sinusoids(position, len(vector))])


@pytest.mark.parametrize(
    ("name", "place", "scale"),
    [("positions_added", added, 6**-0.5), ("positions_concatenated", behind, 12**-0.5)],
)
def test_outputs_and_gradients_are_those_of_the_equations_pair_by_pair(build, agrees, name, place, scale):
    layer = build(name, hidden_size=24, num_heads=4, num_kv_heads=2)
    rows, upstream = doubles(7, 24), doubles(7, 24)
    found, expected = layer(rows[None])[0], by_loops(layer, rows, place, scale)
    oracle = agrees(name, paper="its equation over sinusoids, in loops")
    oracle.outputs(found, expected, 1e-12)
    weights = list(layer.parameters())
    oracle.gradients(*(torch.autograd.grad(out, weights, upstream) for out in (found, expected)), 1e-10)


def test_where_projections_change_nothing_adding_to_each_is_adding_to_the_inputs(build, agrees):
    layer, mha = (build(name, hidden_size=10, num_heads=1) for name in ("positions_added", "mha"))
    with torch.no_grad():
        for one in (layer.query, layer.key, layer.value):
            one.weight.copy_(torch.eye(10))
    mha.load_state_dict(layer.state_dict())
    rows = doubles(2, 6, 10)
    expected = mha(rows + torch.stack([sinusoids(place, 10) for place in range(6)]))
    agrees("positions_added", identity="identity projections: mha of x + p").outputs(layer(rows), expected, 1e-12)
    with torch.no_grad():
        layer.key.weight.mul_(2.0)
    mha.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(rows), mha(rows + torch.stack([sinusoids(place, 10) for place in range(6)])))


def test_concatenated_positions_remember_no_more_than_none(build):
    layer = build("positions_concatenated", hidden_size=24, num_heads=4)
    lent = layer.project_kv(doubles(1, 5, 24))
    assert {name: tuple(field.shape) for name, field in lent.items()} == {"key": (1, 5, 4, 6), "value": (1, 5, 4, 6)}


def depths_by_networkx(heads, tokens):
    """Steps to the root of all `tokens`, the last of which hang in a chain behind the parse."""
    full = [*heads, *range(len(heads) - 1, tokens - 1)]
    graph = nx.DiGraph([(head, token) for token, head in enumerate(full) if head >= 0])
    return nx.shortest_path_length(graph, full.index(-1))


def test_depths_and_positions_are_fused_and_added_to_the_inputs(build, agrees):
    layer = build("dependency_depth", {"parse": SENTENCE}, hidden_size=12, num_heads=2, causal=False)
    mha = build("mha", hidden_size=12, num_heads=2, causal=False)
    rows, depths = doubles(1, 10, 12), depths_by_networkx(SENTENCE, 10)
    assert [depths[token] for token in range(10)] == [2, 2, 1, 0, 2, 2, 1, 1, 2, 3]
    mha.load_state_dict(layer.attention.state_dict())
    u, w = layer.sequential.weight, layer.structural.weight
    fused = torch.stack([torch.tanh(u @ sinusoids(i, 12) + w @ sinusoids(depths[i], 12)) for i in range(10)])
    found, expected = layer(rows), mha(rows + fused)
    oracle = agrees("dependency_depth", paper="mha of x + tanh(U PE + W PE of networkx's depths)")
    oracle.outputs(found, expected, 1e-12)
    upstream = torch.randn_like(found)
    own = [torch.autograd.grad(out, [u, w], upstream, retain_graph=True) for out in (found, expected)]
    oracle.gradients(*own, 1e-10)


def test_another_parse_of_the_same_tokens_gives_other_outputs(build):
    one = build("dependency_depth", {"parse": SENTENCE}, hidden_size=12, num_heads=2)
    other = build("dependency_depth", {"parse": (-1, 0, 0, 0, 0, 0, 0, 0)}, hidden_size=12, num_heads=2)
    other.load_state_dict(one.state_dict())
    rows = doubles(1, 8, 12)
    assert not torch.allclose(one(rows), other(rows))


@pytest.mark.parametrize("parse", [(1, 0), (-1, -1), (-1, 5), "abc"], ids=str)
def test_a_parse_that_is_no_tree_is_refused(build, parse):
    with pytest.raises(InvalidValue, match="dependency_depth"):
        build("dependency_depth", {"parse": parse}, hidden_size=12, num_heads=2)


@pytest.mark.parametrize("name", ["positions_added", "positions_concatenated"])
def test_rotary_positions_are_refused_beside_other_ones(build, name):
    with pytest.raises(Incompatible, match=name):
        build(name, hidden_size=12, num_heads=2, rotary=Rotary())
