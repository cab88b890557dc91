"""Selective attention beside a loop over its equation and the layer of x-transformers, and what only it guarantees."""

import pytest
import torch
from attn_core import Rotary, configure, installed
from attn_core.errors import InvalidValue
from attn_gated.selective import Selective
from attn_testing import Agreement, MechanismLaws
from attn_testing.serving import ragged

SELECTIVE = Selective()
SHARED = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}


class TestSelective(MechanismLaws):
    mechanism = "selective"


def built(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    return SELECTIVE.build(configure(SELECTIVE, {}, **SHARED | settings)).to(dtype)


def by_loops(layer, rows):
    """Equation 1 of the paper for rows [token, width], with four heads of 8 elements and two key/value heads."""
    query, key, value = (part(rows).unflatten(-1, (-1, 8)) for part in (layer.query, layer.key, layer.value))
    out = []
    for token in range(len(rows)):
        masked = []
        for seen in range(token + 1):
            askers = range(seen + 1, token) if seen else ()
            products = [(query[asker, 0] @ key[seen, 0] / 8**0.5).clamp(min=0) for asker in askers]
            masked.append(sum(products, rows.new_zeros(())))
        for head in range(4):
            scores = key[: token + 1, head // 2] @ query[token, head] / 8**0.5 - torch.stack(masked)
            out.append(scores.softmax(0) @ value[: token + 1, head // 2])
    return layer.output(torch.stack(out).view(len(rows), -1))


def test_it_is_its_equation_in_loops(record_property):
    layer = built(bias=True)
    same = Agreement(record_property, "selective", paper="equation 1 in loops")
    learned = [(weight, weight) for weight in layer.parameters()]
    rows = 2 * torch.randn(9, 32, dtype=torch.float64)
    same.functions(lambda x: layer(x[None])[0], lambda x: by_loops(layer, x), rows, tolerance=1e-12, weights=learned)


@pytest.mark.oracle
def test_it_is_that_of_x_transformers(record_property):
    from x_transformers import Attention

    layer = built(torch.float32, num_kv_heads=4)  # theirs share keys and values in another order
    peer = Attention(dim=32, dim_head=8, heads=4, causal=True, selective=True)
    pairs = [(getattr(layer, ours), getattr(peer, theirs)) for ours, theirs in NAMES.items()]
    for ours, theirs in pairs:
        theirs.load_state_dict(ours.state_dict())
    same = Agreement(record_property, "selective", package="x-transformers Attention")
    learned = [(ours.weight, theirs.weight) for ours, theirs in pairs]
    same.functions(layer, peer, 2 * torch.randn(2, 20, 32), tolerance=1e-4, weights=learned)


NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "output": "to_out"}


def test_without_positive_scores_of_the_first_head_it_is_softmax_attention(record_property):
    layer, gqa = built(rotary=Rotary(fraction=0.5, interleaved=True)), installed().mechanisms.get("gqa")
    plain = gqa.build(configure(gqa, {}, **SHARED, rotary=layer.rotary)).double()
    with torch.no_grad():
        layer.query.weight[:8] = 0
    plain.load_state_dict(layer.state_dict())
    rows = torch.randn(2, 20, 32, dtype=torch.float64)
    same = Agreement(record_property, "selective", identity="with a first head without scores gqa")
    same.functions(layer, plain, rows, tolerance=1e-12)


def test_pieces_of_queries_equal_the_whole(monkeypatch):
    layer, rows = built(), torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    whole = layer(rows)
    expected = torch.autograd.grad(whole.square().sum(), rows)[0]
    monkeypatch.setattr("attn_gated.selective.layer.PIECE", 1000)
    torch.testing.assert_close(layer(rows), whole)
    torch.testing.assert_close(torch.autograd.grad(layer(rows).square().sum(), rows)[0], expected)


def test_steps_beyond_the_sums_and_odd_rotary_positions_are_refused():
    layer = built(torch.float32, max_seq_len=4)
    with pytest.raises(InvalidValue) as refused:
        layer.step(torch.randn(1, 32), ragged([1], [4]), {})
    assert refused.value.metadata["field"] == "tokens"
    with pytest.raises(InvalidValue) as refused:
        built(rotary=Rotary(fraction=0.4))
    assert refused.value.metadata["field"] == "rotary.fraction"
