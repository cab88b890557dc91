"""A budget of keys: the latest, and those that were attended to most."""

import itertools

import pytest
import torch
from attn_core import Heads, configure, installed, state_bytes
from attn_core.errors import InvalidValue
from attn_testing.serving import Serving
from attn_testing.subject import Subject
from attn_variants.mechanisms.h2o_layer import Budget, last_queries

TOKENS = 14


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def by_loops(layer, rows, heavy, recent):
    """Algorithm 1 of Zhang et al. 2023 over rows [tokens, width], with sets of Python; and what is left at each token.

    Query heads of a group vote together on the keys that they share.
    """
    query, key, value = (part[0] for part in layer.project(rows[None], None))
    heads = layer.spec.heads
    out, left = [[None] * heads.query for _ in rows], []
    for g in range(heads.key_value):
        kept, accumulated = [], {}
        for i in range(len(rows)):
            kept.append(i)
            accumulated[i] = 0.0
            left.append((g, i, sorted(kept)))
            for h in (h for h in range(heads.query) if h // heads.per_group == g):
                scores = torch.stack([query[i, h] @ key[j, g] / heads.key_size**0.5 for j in kept])
                weights = torch.softmax(scores, 0)
                out[i][h] = sum(w * value[j, g] for w, j in zip(weights, kept, strict=True))
                for w, j in zip(weights.tolist(), kept, strict=True):
                    accumulated[j] += w
            if len(kept) > heavy + recent:
                kept.remove(min((j for j in kept if j <= i - recent), key=accumulated.__getitem__))
    return layer.output(torch.stack(list(itertools.chain(*out))).view(len(rows), -1)), left


@pytest.mark.parametrize(("heavy", "recent"), [(3, 2), (0, 4), (0, 1), (5, 1)])
@pytest.mark.parametrize("sizes", [{"num_heads": 2}, {"num_heads": 4, "num_kv_heads": 2}], ids=str)
def test_outputs_gradients_and_what_is_kept_are_those_of_the_algorithm(build, agrees, sizes, heavy, recent):
    layer = build("h2o", {"heavy": heavy, "recent": recent}, hidden_size=16, **sizes)
    rows, upstream = 3 * doubles(TOKENS, 16), doubles(TOKENS, 16)
    found, (expected, left) = layer(rows[None])[0], by_loops(layer, rows, heavy, recent)
    seen = layer.weights(rows[None])[0] > 0
    for g, i, kept in left:
        assert seen[g * layer.spec.heads.per_group, i].nonzero()[:, 0].tolist() == kept
    oracle = agrees("h2o", paper="algorithm 1 over sets of tokens, in loops")
    oracle.outputs(found, expected, 1e-12)
    weights = list(layer.parameters())
    oracle.gradients(*(torch.autograd.grad(out, weights, upstream) for out in (found, expected)), 1e-10)


def test_a_budget_of_the_length_is_full_attention(build, agrees):
    layer, mha = (
        build("h2o", {"heavy": 6, "recent": 8}, hidden_size=16, num_heads=2),
        build("mha", hidden_size=16, num_heads=2),
    )
    mha.load_state_dict(layer.state_dict())
    rows = doubles(2, TOKENS, 16)
    agrees("h2o", identity="a budget of the length is mha").outputs(layer(rows), mha(rows), 1e-12)


def test_no_heavy_keys_are_a_window(build, agrees):
    layer = build("h2o", {"heavy": 0, "recent": 4}, hidden_size=16, num_heads=2)
    window = build("sliding_window", {"window": 5}, hidden_size=16, num_heads=2)
    window.load_state_dict(layer.state_dict())
    rows = doubles(2, TOKENS, 16)
    agrees("h2o", identity="no heavy keys: a window of one more").outputs(layer(rows), window(rows), 1e-12)


def test_a_key_that_all_attend_to_stays_and_one_that_none_does_goes():
    heads = Heads(query=1, key_value=1, key_size=1, value_size=1)
    key = torch.zeros(1, 1, 12, 1)
    key[0, 0, 2], key[0, 0, 5] = 4.0, -4.0
    last = last_queries(heads, torch.ones(1, 1, 12, 1), key, None, Budget(heavy=3, recent=2))[0, 0].tolist()
    assert last[2] == 12
    assert last[5] == 7  # where it is no longer among the two latest
    assert sorted(last)[:7] == [5, 6, 7, 8, 9, 10, 11]
    assert last.count(12) == 5


@pytest.mark.parametrize("tokens", [64, 65, 130])
def test_tiles_of_queries_are_the_whole_forward_and_backward(build, tokens):
    layer, rows = build("h2o", {"heavy": 5, "recent": 4}, hidden_size=8, num_heads=2), doubles(1, tokens, 8)
    value = layer.value(rows).view(1, tokens, 2, 4)
    whole = layer.output(torch.einsum("bhqk,bkhd->bqhd", layer.weights(rows), value).flatten(-2))
    assert torch.allclose(layer(rows), whole, rtol=0, atol=1e-13)
    weights = list(layer.parameters())
    upstream = torch.randn_like(whole)
    for one, other in zip(*(torch.autograd.grad(out, weights, upstream) for out in (layer(rows), whole)), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_of_keys_that_gained_as_much_the_oldest_goes():
    budget, accumulated = Budget(heavy=2, recent=1), torch.tensor([1.0, 0.5, 0.5, 0.1])
    positions = torch.tensor([0, 7, 3, 9])
    assert budget.evicted(accumulated, positions, torch.tensor([9]), torch.ones(4, dtype=torch.bool)) == 2


def test_a_request_weighs_its_budget_however_long_it_is_and_decodes_as_the_whole():
    options = {"heavy": 2, "recent": 2}
    case = Subject("h2o", options, ({"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2},)).cases[0]
    serving = Serving(case)
    serving.open(0)
    rows = case.rows(30)
    pieces = [serving.step({0: rows[start : start + 6]})[0] for start in range(0, 30, 6)]
    assert torch.allclose(torch.cat(pieces), case.attend(rows[None])[0], rtol=0, atol=1e-6)
    by_hand = 2 * 4 * (4 * 8 + 4 * 8 + 4 + 4)  # heads, rows, and a key and a value of four float64, float32, int32
    assert serving.store.live_bytes(0, 30) == by_hand
    assert {state_bytes(case.specs, tokens=tokens, dtype="float64") for tokens in (1, 30, 10**6)} == {by_hand}


@pytest.mark.parametrize(("option", "value"), [("heavy", -1), ("recent", 0), ("recent", 1.5)])
def test_budgets_below_one_recent_key_are_refused(option, value):
    with pytest.raises(InvalidValue, match=rf"mechanism 'h2o'.*{option}"):
        configure(installed().mechanisms.get("h2o"), {option: value}, hidden_size=16, num_heads=2)
