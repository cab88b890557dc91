import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import UserError
from attn_variants.mechanisms.clusters_layers import Clustered


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def clustered(**changed):
    return Clustered(**{"size": 5, "clusters": 3, "bits": 9, "iterations": 4, "top": 0, "seed": 2} | changed)


@pytest.mark.parametrize("top", [0, 3])
def test_as_many_groups_as_queries_are_softmax_attention(build, agrees, top):
    layer = build("clustered", {"clusters": 7, "top": top}, hidden_size=12, num_heads=3, causal=False)
    full = build("mha", hidden_size=12, num_heads=3, causal=False)
    full.load_state_dict(layer.state_dict())
    same = agrees("clustered", identity="as many groups as queries are mha")
    same.functions(layer, full, rows(2, 7, 12), tolerance=1e-12)


def test_with_every_key_among_the_best_it_is_softmax_attention_however_few_the_groups(build):
    layer = build("clustered", {"clusters": 1, "top": 9}, hidden_size=12, num_heads=3, causal=False)
    full = build("mha", hidden_size=12, num_heads=3, causal=False)
    full.load_state_dict(layer.state_dict())
    inputs = rows(2, 7, 12)
    assert torch.allclose(layer(inputs), full(inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("top", [0, 2])
def test_each_output_equals_the_equations_of_the_paper_in_loops(agrees, top):
    layer, given = clustered(top=top), [rows(1, 1, 8, 5) for _ in range(3)]
    group = layer.groups(given[0], None)[0, 0]
    assert len(set(group.tolist())) > 1

    def by_loops(query, key, value):
        q, k, v = query[0, 0], key[0, 0], value[0, 0]
        out = []
        for i in range(8):
            weights = (k @ q[group == group[i]].mean(0) / 5**0.5).softmax(0)
            best = weights.topk(top).indices
            anew = weights[best].sum() * ((k[best] @ q[i] / 5**0.5).softmax(0) @ v[best]) if top else 0.0
            out.append(weights @ v - weights[best] @ v[best] + anew)
        return torch.stack(out)[None, None]

    loops = agrees("clustered", paper="the equations in loops")
    loops.functions(lambda *tensors: layer(*tensors, None), by_loops, *given, tolerance=1e-12)


def test_groups_are_those_of_lloyds_algorithm_on_signs():
    layer, query = clustered(), rows(1, 1, 8, 5)
    codes = torch.where(query[0, 0] @ layer.projection >= 0, 1.0, -1.0)
    centres = codes[[0, 8 // 3, 16 // 3]].clone()
    for _ in range(4):
        nearest = [max(range(3), key=lambda c: (code @ centres[c]).item()) for code in codes]
        for cluster in range(3):
            sums = sum((code for code, own in zip(codes, nearest, strict=True) if own == cluster), torch.zeros(9))
            centres[cluster] = torch.where(sums == 0, centres[cluster], sums.sign())
    nearest = [max(range(3), key=lambda c: (code @ centres[c]).item()) for code in codes]
    assert layer.groups(query, None)[0, 0].tolist() == nearest


def test_queries_alike_get_outputs_alike_where_no_key_is_weighed_anew():
    layer, query = clustered(), rows(1, 1, 6, 5)
    query[:, :, 1::2] = query[:, :, :1] * 1.5
    out = layer(query, rows(1, 1, 6, 5), rows(1, 1, 6, 5), None)
    assert torch.equal(out[0, 0, 1], out[0, 0, 3])


@pytest.mark.parametrize("options", [{"clusters": 0}, {"bits": 0}, {"iterations": 0}, {"top": -1}])
def test_a_bad_option_is_refused(options):
    with pytest.raises(UserError):
        configure(installed().mechanisms.get("clustered"), options, hidden_size=12, num_heads=3, causal=False)
