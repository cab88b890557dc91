"""Policies over a KV cache: which rows stay or are read, by loops over sets; over any softmax attention."""

import pytest
import torch
from attn_core import Rotary, Step, configure, installed, state_bytes
from attn_core.errors import InvalidValue
from attn_testing import MechanismLaws

SIZES = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2}
SETTINGS = ({**SIZES, "rotary": Rotary(fraction=0.5, interleaved=True)},)


class TestSnapKV(MechanismLaws):
    mechanism = "snapkv"
    options = {"budget": 6, "interval": 4, "window": 2, "pool": 3, "over": "alibi"}
    settings = SETTINGS


class TestTova(MechanismLaws):
    mechanism = "tova"
    options = {"budget": 4}
    settings = SETTINGS


class TestQuest(MechanismLaws):
    mechanism = "quest"
    options = {"block": 3, "top": 2}
    settings = SETTINGS


def rows_of(*shape):
    return 3 * torch.randn(*shape, dtype=torch.float64)


def scores_of(layer, rows):
    """Softmax attention's scores [head][query, key] and values by head, with the layer's own projections."""
    query, key, value = (part[0] for part in layer.project(rows[None], None))
    heads = layer.spec.heads
    per = heads.query // heads.key_value
    scores = [query[:, h] @ key[:, h // per].T / heads.key_size**0.5 for h in range(heads.query)]
    return scores, [value[:, h // per] for h in range(heads.query)], per


def by_loops(layer, rows, *, budget, interval, window, pool, together=False):
    """Eviction after every interval, over lists of Python numbers, for each key/value head by itself."""
    scores, values, per = scores_of(layer, rows)
    groups = len(scores) // per
    kept, out = [[] for _ in range(groups)], []
    votes = [{} for _ in range(groups)]
    for token in range(len(rows)):
        here = []
        for g in range(groups):
            kept[g].append(token)
            for h in range(g * per, (g + 1) * per):
                weights = torch.softmax(scores[h][token, kept[g]], 0)
                here.append(weights @ values[h][kept[g]])
                if token % interval >= interval - window:
                    for voters in votes if together else [votes[g]]:
                        for weight, j in zip(weights.tolist(), kept[g], strict=True):
                            voters[j] = voters.get(j, 0.0) + weight
        out.append(torch.cat(here))
        if (token + 1) % interval == 0:
            for g in range(groups):
                if len(kept[g]) > budget:
                    old, last = kept[g][:-window], kept[g][-window:]
                    flat = [0.0] * (pool // 2) + [votes[g].get(j, 0.0) for j in old] + [0.0] * (pool // 2)
                    mean = {j: sum(flat[i : i + pool]) / pool for i, j in enumerate(old)}
                    best = sorted(old, key=lambda j: (mean[j], j), reverse=True)[: budget - window]
                    kept[g] = sorted(best) + last
            votes = [{} for _ in range(groups)]
    return layer.output(torch.stack(out))


@pytest.mark.parametrize(
    ("name", "options", "rules"),
    [
        ("snapkv", {"budget": 6, "interval": 5, "window": 2, "pool": 3}, {}),
        ("snapkv", {"budget": 4, "interval": 7, "window": 4, "pool": 1}, {}),
        ("tova", {"budget": 5}, {"interval": 1, "window": 1, "pool": 1, "together": True}),
    ],
    ids=str,
)
def test_outputs_are_those_of_the_algorithm(build, agrees, name, options, rules):
    layer, rows = build(name, options, **SIZES), rows_of(23, 16)
    oracle = agrees(name, paper="the choice of rows over lists of numbers, in loops")
    oracle.functions(
        lambda given: layer(given[None])[0],
        lambda given: by_loops(layer, given, **options, **rules),
        rows,
        tolerance=1e-10,
    )


def test_quest_reads_the_pages_with_the_largest_bounds(build, agrees):
    layer = build("quest", {"block": 4, "top": 3}, **SIZES)
    loops = agrees("quest", paper="the bounds of pages, in loops")
    loops.functions(
        lambda given: layer(given[None])[0],
        lambda given: by_pages(layer, given, 4, 3),
        rows_of(22, 16),
        tolerance=1e-10,
    )


def by_pages(layer, rows, block, top):
    """Attention of each query to its own page and to those with the largest bounds, over lists of Python numbers."""
    query, key, _ = (part[0] for part in layer.project(rows[None], None))
    scores, values, per = scores_of(layer, rows)
    out = []
    for i in range(len(rows)):
        for h in range(len(scores)):
            pages = {}
            for page in range(i // block):
                keys = key[page * block : (page + 1) * block, h // per]
                ends = query[i, h] * keys.amin(0), query[i, h] * keys.amax(0)
                pages[page] = torch.maximum(*ends).sum().item()
            read = {i // block, *sorted(pages, key=pages.__getitem__)[-(top - 1) :]}
            seen = [j for j in range(i + 1) if j // block in read]
            out.append(torch.softmax(scores[h][i, seen], 0) @ values[h][seen])
    return layer.output(torch.cat(out).view(len(rows), -1))


@pytest.mark.parametrize(
    ("name", "options"), [("snapkv", {"budget": 30, "window": 2}), ("tova", {"budget": 30}), ("quest", {"top": 30})]
)
@pytest.mark.parametrize("over", ["gqa", "alibi", "qk_norm", "soft_cap"])
def test_a_budget_of_the_length_is_the_attention_under_it(build, agrees, name, options, over):
    sizes = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 2}
    layer, whole = build(name, {**options, "over": over}, **sizes), build(over, **sizes)
    whole.load_state_dict(layer.state_dict())
    rows = rows_of(2, 20, 16)
    agrees(name, identity=f"a budget of the length is {over}").outputs(layer(rows), whole(rows), 1e-10)


def test_the_cache_is_bounded_by_budget_and_interval():
    mechanism = installed().mechanisms.get("snapkv")
    config = configure(mechanism, hidden_size=16, num_heads=2, options={"budget": 6, "interval": 4, "window": 2})
    sizes = [state_bytes(mechanism.state(config), tokens=tokens, dtype="float32") for tokens in (10, 1000)]
    assert sizes[0] == sizes[1] == 2 * (6 + 4) * (2 * 8 * 4 + 4)
    costs = [mechanism.cost(config, Step(batch=1, new=1, remembered=at)).flops for at in (1000, 100_000)]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("over", ["sigmoid", "nsa", "sliding_window", "linear", "no_such"])
def test_attention_that_is_no_plain_softmax_is_refused(over):
    with pytest.raises(InvalidValue, match="over"):
        installed().mechanisms.get("quest").build(
            configure(installed().mechanisms.get("quest"), hidden_size=16, num_heads=2, options={"over": over})
        )
