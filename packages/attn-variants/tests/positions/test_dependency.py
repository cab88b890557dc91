"""Distances in the tree of a sentence."""

import itertools
import math
import random

import networkx as nx
import pytest
import torch
from attn_core.errors import InvalidValue
from attn_core.modifiers import DependencyTree
from attn_variants.compute.dependency import tree_distances

# "The old man saw a small dog yesterday": saw is the root.
SENTENCE = (2, 2, 3, -1, 6, 6, 3, 3)


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def drawn(tokens, seed):
    """A random tree whose root and order are random too."""
    chance = random.Random(seed)
    order = chance.sample(range(tokens), tokens)
    heads = [-1] * tokens
    for place, token in enumerate(order[1:], 1):
        heads[token] = order[chance.randrange(place)]
    return tuple(heads)


def by_networkx(heads, tokens):
    """The distances of the paper from shortest paths in a graph of all `tokens`, the last of which hang in a chain."""
    full = [*heads, *range(len(heads) - 1, tokens - 1)]
    graph = nx.DiGraph([(head, token) for token, head in enumerate(full) if head >= 0])
    graph.add_nodes_from(range(tokens))
    depth = nx.shortest_path_length(graph, full.index(-1))
    found = []
    for i, j in itertools.product(range(tokens), repeat=2):
        if nx.has_path(graph, i, j) or nx.has_path(graph, j, i):
            found.append(depth[i] - depth[j])
        else:
            found.append((depth[i] + depth[j]) * (1 if i < j else -1))
    return torch.tensor(found).view(tokens, tokens)


def distances(heads, tokens):
    at = torch.arange(tokens)
    return tree_distances(DependencyTree(heads), at[:, None], at[None])


def test_distances_of_a_sentence_are_those_counted_by_hand():
    found = distances(SENTENCE, 8)
    assert DependencyTree(SENTENCE).depths == (2, 2, 1, 0, 2, 2, 1, 1)
    assert found[0].tolist() == [0, 4, 1, 2, 4, 4, 3, 3]
    assert found[6].tolist() == [-3, -3, -2, 1, -1, -1, 0, 2]
    assert found[3].tolist() == [-2, -2, -1, 0, -2, -2, -1, -1]


@pytest.mark.parametrize("seed", range(6))
def test_distances_are_those_of_shortest_paths_in_any_tree_and_behind_it(seed):
    heads = drawn(1 + 3 * seed, seed)
    assert torch.equal(distances(heads, len(heads) + 4), by_networkx(heads, len(heads) + 4))


def by_loops(layer, rows, apart, clip):
    """Equations 3 and 4 of Shaw et al. over the distances [tokens, tokens] of a tree, one pair at a time."""
    query, key, value = (part[0] for part in layer.project(rows[None], None))
    tokens, heads, size = query.shape
    keys, values = (layer.modifiers[kind].table for kind in ("dependency_keys", "dependency_values"))
    out = []
    for i, h in itertools.product(range(tokens), range(heads)):
        row = [max(-clip, min(clip, int(apart[i, j]))) + clip for j in range(tokens)]
        scores = [query[i, h] @ (key[j, h] + keys[h, row[j]]) / math.sqrt(size) for j in range(tokens)]
        weights = torch.softmax(torch.stack(scores), 0)
        out.append(sum(w * (value[j, h] + values[h, row[j]]) for j, w in enumerate(weights)))
    return layer.output(torch.stack(out).view(tokens, -1))


def test_attention_is_the_equations_of_the_paper_forward_and_backward(build, agrees):
    layer = build("dependency", {"parse": SENTENCE, "clip": 3}, hidden_size=12, num_heads=2, causal=False)
    rows, upstream = doubles(10, 12), doubles(10, 12)
    found, expected = layer(rows[None])[0], by_loops(layer, rows, by_networkx(SENTENCE, 10), 3)
    oracle = agrees("dependency", paper="Shaw's equations over networkx's paths, in loops")
    oracle.outputs(found, expected, 1e-12)
    weights = list(layer.parameters())
    oracle.gradients(*(torch.autograd.grad(out, weights, upstream) for out in (found, expected)), 1e-10)


def test_a_chain_is_shaw_with_its_vectors_in_reverse(build, agrees):
    tree = build("dependency", {"clip": 3}, hidden_size=12, num_heads=2)
    shaw = build("shaw", {"clip": 3}, hidden_size=12, num_heads=2)
    own = tree.state_dict()
    shaw.load_state_dict(
        {
            name.replace("dependency", "relative"): part.flip(1) if "modifiers" in name else part
            for name, part in own.items()
        }
    )
    rows = doubles(2, 9, 12)
    agrees("dependency", identity="a chain is shaw, read backwards").outputs(tree(rows), shaw(rows), 1e-12)


def test_another_parse_of_the_same_tokens_gives_other_outputs(build):
    one = build("dependency", {"parse": SENTENCE}, hidden_size=12, num_heads=2, causal=False)
    other = build("dependency", {"parse": (1, 2, 3, -1, 3, 4, 5, 6)}, hidden_size=12, num_heads=2, causal=False)
    other.load_state_dict(one.state_dict())
    rows = doubles(1, 8, 12)
    assert not torch.allclose(one(rows), other(rows))


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        ((-1, 2, 3, 1), r"the cycle 1 -> 2 -> 3 -> 1"),
        ((1, 0), r"the cycle 0 -> 1 -> 0"),
        ((-1, 0, 2), r"the cycle 2 -> 2"),
        ((-1, 4, 1, 2, 3), r"the cycle 1 -> 4 -> 3 -> 2 -> 1"),
        ((3, -1, 0, 2), r"the cycle 0 -> 3 -> 2 -> 0"),
        ((-1, 0, -1), r"the roots \[0, 2\]"),
        ((-1, 3, 0), r"heads\[1\]: 3"),
        ((-1, -2), r"heads\[1\]: -2"),
        ((-1, 0.5), "parse"),
        ((-1, math.nan), "parse"),
        ((-1, math.inf), "parse"),
        ((-1, True), "parse"),
        ("abc", "parse"),
        (3, "parse"),
    ],
    ids=str,
)
def test_heads_that_are_no_tree_are_refused_and_a_cycle_names_its_tokens(build, parse, message):
    with pytest.raises(InvalidValue, match=message):
        build("dependency", {"parse": parse}, hidden_size=12, num_heads=2)


def test_a_parse_of_thousands_of_words_is_walked_once():
    deep = tuple(range(-1, 4999))
    assert DependencyTree(deep).depths == tuple(range(5000))
    with pytest.raises(InvalidValue, match="the cycle"):
        DependencyTree((4999, *range(4999)))


@pytest.mark.parametrize("name", ["dependency", "dependency_depth"])
def test_the_trees_of_a_call_are_those_of_layers_with_each_as_option(build, name):
    """Drawn trees, whose distances in the options are those of networkx; the shorter sentence is padded."""
    rows, trees = doubles(2, 7, 8), [drawn(7, 1), drawn(5, 2)]
    sizes = {"hidden_size": 8, "num_heads": 2, "causal": False}
    layer = build(name, {}, **sizes).double().eval()
    parses = torch.tensor([trees[0], [*trees[1], -1, -1]])
    keep = torch.arange(7) < torch.tensor([[7], [5]])
    found = layer(rows, key_padding_mask=keep, parses=parses)
    weights = layer.weights(rows, key_padding_mask=keep, parses=parses)
    for place, tree in enumerate(trees):
        alone = build(name, {"parse": tree}, **sizes).double().eval()
        alone.load_state_dict(layer.state_dict())
        own = rows[place : place + 1, : len(tree)]
        torch.testing.assert_close(found[place : place + 1, : len(tree)], alone(own))
        torch.testing.assert_close(weights[place : place + 1, :, : len(tree), : len(tree)], alone.weights(own))


@pytest.mark.parametrize(
    ("parses", "said"),
    [([[1, 2, 0]], "a cycle"), ([[-1, -1, 0]], "2 roots"), ([[-1, 3, 0]], "tokens from 0 to 2"), ([[-1, 0]], "parses")],
)
def test_what_is_no_tree_is_refused_in_a_call(build, parses, said):
    layer = build("dependency", {}, hidden_size=8, num_heads=2, causal=False)
    with pytest.raises(InvalidValue, match=said):
        layer(torch.randn(1, 3, 8, dtype=torch.float32), parses=torch.tensor(parses))
