"""Causal LSH and routing in loops: the last tokens of the own bucket or cluster, counted back from each token."""

from __future__ import annotations

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import InvalidValue
from attn_variants.mechanisms.causal_clusters_layers import CausalHashBuckets, CausalRouting, CausalSortedBlocks


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def hashed(**changed):
    options = {"size": 6, "buckets": 4, "chunk": 3, "rounds": 2, "seed": 5, "within": "bucket"}
    return CausalHashBuckets(**options | {"duplicates": "corrected"} | changed)


def by_loops(kinds, query, value, window, real=None):
    """Outputs of one head: `kinds` [rounds, token], each token sees the last `window` of its kind in any round."""
    out = []
    for i in range(len(query)):
        seen = set()
        for kind in kinds:
            same = [j for j in range(i + 1) if kind[j] == kind[i] and (real is None or real[j])]
            seen |= set(same[-window:])
        places = sorted(seen - {i}) or [i]
        keys = query[places] / query[places].norm(dim=-1, keepdim=True)
        out.append((keys @ query[i] / query.shape[-1] ** 0.5).softmax(0) @ value[places])
    return torch.stack(out)


@pytest.mark.parametrize(("window", "rounds", "tokens"), [(3, 2, 11), (2, 3, 12), (4, 1, 3), (1, 1, 5), (16, 2, 9)])
def test_lsh_sees_the_last_tokens_of_its_buckets(agrees, window, rounds, tokens):
    layer, query, value = hashed(chunk=window, rounds=rounds), rows(2, 2, tokens, 6), rows(2, 2, tokens, 3)
    query.requires_grad_()
    buckets = layer.buckets(query)
    expected = torch.stack(
        [torch.stack([by_loops(buckets[b, h], query[b, h], value[b, h], window) for h in range(2)]) for b in range(2)]
    )
    loops, out = agrees("lsh_causal", paper="the last tokens of each bucket in loops"), layer(query, query, value, None)
    loops.outputs(out, expected, 1e-12)
    probe = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((made * probe).sum(), query)[0] for made in (out, expected))
    loops.gradients([ours], [theirs], 1e-10)


def test_padding_before_and_between_tokens_is_not_seen():
    layer, query, value = hashed(), rows(1, 1, 10, 6), rows(1, 1, 10, 3)
    real = torch.tensor([False, True, True, False, True, True, True, False, True, True])
    expected = by_loops(layer.buckets(query)[0, 0], query[0, 0], value[0, 0], 3, real)
    out = layer(query, query, value, real[None])[0, 0]
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=1e-12)


def test_routing_sees_the_last_tokens_of_its_cluster(agrees):
    layer = CausalRouting(heads=2, size=6, clusters=3, window=3, decay=0.9, seed=1).double()
    query, value = rows(1, 2, 13, 6).requires_grad_(), rows(1, 2, 13, 4).requires_grad_()
    parts = []
    for h in range(2):
        kinds = [max(range(3), key=lambda c: (layer.centroids[h, c] @ row).item()) for row in query[0, h]]
        parts.append(by_loops([kinds], query[0, h], value[0, h], 3))
    loops = agrees("routing_causal", paper="the last tokens of each cluster in loops")
    out, expected = layer.eval()(query, query, value, None)[0], torch.stack(parts)
    loops.outputs(out, expected, 1e-12)
    probe = torch.randn_like(out)
    loops.gradients(*(torch.autograd.grad((made * probe).sum(), [query, value]) for made in (out, expected)), 1e-10)


def test_centroids_follow_the_tokens_nearest_to_them_after_the_update_that_they_serve():
    layer = CausalRouting(heads=1, size=4, clusters=2, window=3, decay=0.5, seed=1).double()
    query, value, before = rows(1, 1, 8, 4), rows(1, 1, 8, 4), layer.centroids.clone()
    kept = layer.eval()(query, query, value, None)
    assert torch.equal(layer.train()(query, query, value, None), kept)
    layer.after_update(lambda value: value)
    for cluster in range(2):
        near = [row for row in query[0, 0] if (before[0] @ row).argmax() == cluster]
        if not near:
            assert torch.equal(layer.centroids[0, cluster], before[0, cluster])
            continue
        mean = sum(row / row.norm() for row in near)
        moved = 0.5 * before[0, cluster] + 0.5 * mean / mean.norm()
        torch.testing.assert_close(layer.centroids[0, cluster], moved / moved.norm())


@pytest.mark.parametrize("name", ["lsh_causal", "routing_causal"])
def test_a_token_changes_nothing_before_it_even_where_it_is_sorted_in_early(name):
    """Of many sequences: chunks of the sorted order, which a later token moves, must not show."""
    mechanism = installed().mechanisms.get(name)
    layer = mechanism.build(configure(mechanism, {"window": 2}, hidden_size=8, num_heads=2)).double().train()
    for seed in range(20):
        torch.manual_seed(seed)
        start = torch.randn(1, 24, 8, dtype=torch.float64)
        state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
        out = layer(start)
        layer.load_state_dict(state)
        changed = layer(torch.cat([start[:, :23], 5 * torch.randn(1, 1, 8, dtype=torch.float64)], dim=1))
        layer.load_state_dict(state)
        torch.testing.assert_close(out[:, :23], changed[:, :23], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lsh_causal", {"buckets": 3}),
        ("lsh_causal", {"window": 0}),
        ("routing_causal", {"clusters": 0}),
        ("routing_causal", {"decay": 2}),
    ],
)
def test_a_bad_option_is_refused(name, options):
    with pytest.raises(InvalidValue, match=next(iter(options))):
        configure(installed().mechanisms.get(name), options, hidden_size=8, num_heads=2)


def test_one_block_of_the_causal_sort_is_causal_attention(build, agrees):
    layer, full = (
        build(name, options, hidden_size=12, num_heads=3)
        for name, options in [("sinkhorn_causal", {"block": 9}), ("mha", {})]
    )
    full.load_state_dict(layer.state_dict())
    rows = torch.randn(2, 7, 12, dtype=torch.float64)
    agrees("sinkhorn_causal", identity="one block is causal mha").functions(layer, full, rows, tolerance=1e-12)


def test_the_causal_sort_is_its_definition_in_loops(agrees):
    layer = CausalSortedBlocks(block=2, iterations=3, temperature=0.5)

    def by_hand(query, key, value):
        q, k, v = (one[0, 0] for one in (query, key, value))
        blocks = [range(2), range(2, 4), range(4, 6), range(6, 7)]
        mix = {
            (b, j): (q[list(blocks[b - 1])].mean(0) @ k[list(blocks[j])].mean(0) / 4**0.5 / 0.5).exp()
            for b in range(4)
            for j in range(b)
        }
        for _ in range(3):
            mix = {(b, j): share / sum(mix[b, other] for other in range(b)) for (b, j), share in mix.items()}
            mix = {(b, j): share / sum(mix[row, j] for row in range(j + 1, b + 1)) for (b, j), share in mix.items()}
        out = []
        for token in range(7):
            b = token // 2
            own = list(range(2 * b, token + 1))
            keys, values = [*k[own]], [*v[own]]
            for place in range(2 if b else 0):
                keys.append(sum(mix[b, j] * k[blocks[j][place]] for j in range(b)))
                values.append(sum(mix[b, j] * v[blocks[j][place]] for j in range(b)))
            out.append((torch.stack(keys) @ q[token] / 2).softmax(0) @ torch.stack(values))
        return torch.stack(out)[None, None]

    given = [torch.randn(1, 1, 7, 4, dtype=torch.float64) for _ in range(3)]
    loops = agrees("sinkhorn_causal", paper="blocks before and normalisations so far in loops")
    loops.functions(lambda *tensors: layer(*tensors, None), by_hand, *given, tolerance=1e-12)
