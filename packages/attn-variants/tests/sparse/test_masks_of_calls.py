"""Masks that come with the data: packed documents, trees of candidates, graphs."""

import itertools

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Rotary
from attn_core.masks import Graph, Segments, Tree
from attn_variants.attention.layer import SpecLayer
from attn_variants.compute.block_sparse import attend as block_sparse
from attn_variants.compute.plain import attend, attention_weights
from attn_variants.compute.torch_sdpa import attend as sdpa

LAYOUT = Heads(query=4, key_value=2, key_size=4, value_size=4)
COMPUTATIONS = [attend, sdpa, block_sparse.attend]


def layer_of(mask, **more):
    torch.manual_seed(0)
    return SpecLayer(AttentionSpec(heads=LAYOUT, mask=mask, **more), hidden_size=16, bias=False).double()


@pytest.mark.parametrize("lengths", [(4, 1, 6), (0, 9), (3, 3, 3)], ids=str)
def test_packed_documents_are_what_they_are_alone_forward_and_gradient(lengths):
    varlen, alone = layer_of(Segments(lengths) & Causal()), layer_of(Causal())
    rows = torch.randn(1, sum(lengths), 16, dtype=torch.float64, requires_grad=True)
    together = varlen(rows)
    pieces = [alone(piece) for piece in rows.split(lengths, dim=1) if piece.shape[1]]
    assert torch.allclose(together, torch.cat(pieces, dim=1), rtol=0, atol=1e-13)
    probe = torch.linspace(-1, 1, together.numel(), dtype=torch.float64).view_as(together)
    (found,) = torch.autograd.grad((together * probe).sum(), rows)
    (expected,) = torch.autograd.grad((torch.cat(pieces, dim=1) * probe).sum(), rows)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_turned_documents_are_what_they_are_alone_because_turns_are_relative():
    varlen, alone = layer_of(Segments((5, 4)) & Causal(), rotary=Rotary()), layer_of(Causal(), rotary=Rotary())
    rows = torch.randn(1, 9, 16, dtype=torch.float64)
    pieces = [alone(piece) for piece in rows.split((5, 4), dim=1)]
    assert torch.allclose(varlen(rows), torch.cat(pieces, dim=1), rtol=0, atol=1e-12)


def test_every_path_of_a_tree_sees_what_it_would_see_alone():
    parents, context = (-1, 0, 0, 1, -1, 4, 2), 3
    tree = Tree(parents, context=context)
    layer, chain = layer_of(tree), layer_of(Causal())
    rows = torch.randn(1, context + len(parents), 16, dtype=torch.float64)
    out = layer(rows)
    for node in range(len(parents)):
        path = [*range(context), *(context + step for step in reversed(tree.path(node)))]
        assert torch.allclose(out[:, context + node], chain(rows[:, path])[:, -1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_a_complete_graph_is_full_attention(computation):
    nodes = range(6)
    complete = Graph.of(6, itertools.product(nodes, nodes))
    rows = torch.randn(3, 2, 6, 4, 4, dtype=torch.float64)
    operands = AttentionInputs(query=rows[0], key=rows[1][:, :, :2], value=rows[2][:, :, :2])
    found = computation(AttentionSpec(heads=LAYOUT, mask=complete), operands)
    full = attend(AttentionSpec(heads=LAYOUT, mask=Full()), operands)
    assert torch.allclose(found, full, rtol=0, atol=1e-13)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_an_isolated_node_gives_zeros_and_gets_no_gradient(computation):
    spec = AttentionSpec(heads=LAYOUT, mask=Graph.of(4, [(0, 1), (1, 0), (3, 3)]))
    rows = [torch.randn(1, 4, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    operands = AttentionInputs(query=rows[0], key=rows[1], value=rows[2])
    out = computation(spec, operands)
    assert torch.equal(out[:, 2], torch.zeros(1, 4, 4, dtype=torch.float64))
    out.sum().backward()
    assert all(torch.equal(tensor.grad[:, 2], torch.zeros_like(tensor[:, 2])) for tensor in rows)
    assert all(torch.isfinite(tensor.grad).all() for tensor in rows)
    assert torch.equal(attention_weights(spec, operands)[:, :, 2], torch.zeros(1, 4, 4, dtype=torch.float64))
