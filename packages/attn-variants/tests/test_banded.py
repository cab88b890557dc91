"""Attention to neighbours: every score and distribution, in the length times the reach."""

import math
from functools import partial

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, Shape, Window, configure, installed
from attn_core.kernels.attend import attend_problem
from attn_core.kernels.dispatch import choose
from attn_core.masks import Prefix
from attn_core.modifiers import SoftCap
from attn_core.scores import General, ScaledDot
from attn_variants.compute import banded, plain
from attn_variants.kernels.attend import Banded
from torch.utils.flop_counter import FlopCounterMode

HEADS = Heads(query=2, key_value=1, key_size=4, value_size=4)
MASKS = [
    Window(left=3),
    Window(left=0, right=5),
    Window(left=2, right=1, dilation=5),
    Window(left=40) & Causal(),
    Window(left=9, right=9) & Prefix(60),
    Window(left=20) & ~Window(left=4),
]


def draw(queries, keys, batch=2):
    rows = [torch.randn(batch, length, heads, 4).double() for length, heads in ((queries, 2), (keys, 1), (keys, 1))]
    return dict(zip(("query", "key", "value"), (part.requires_grad_() for part in rows), strict=True))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(90, 90), (1, 70), (33, 70), (70, 33), (5, 1)])
def test_tiles_give_what_the_whole_gives_forward_and_backward(mask, queries, keys):
    spec = AttentionSpec(heads=HEADS, mask=mask, modifiers=(SoftCap(cap=2.0),))
    rows, found = draw(queries, keys), []
    key_padding_mask = torch.rand(2, keys) < 0.8
    for attend in (partial(banded.attend, tile=16), plain.attend):
        for places in (None, torch.arange(queries)[None], torch.arange(queries) + torch.tensor([[2], [11]])):
            out = attend(spec, AttentionInputs(**rows, key_padding_mask=key_padding_mask, query_positions=places))
            found.append([out, *torch.autograd.grad(out.square().sum(), list(rows.values()))])
    for tiled, whole in zip(found[:3], found[3:], strict=True):
        for one, other in zip(tiled, whole, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)


def problem(length, mask=MASKS[0], **more):
    spec = AttentionSpec(heads=HEADS, mask=mask, score=more.pop("score", General()))
    call = {"dtype": "float32", "device": "cpu", "gradients": True, "padded": False, "has_positions": False, **more}
    return attend_problem(spec, **call, queries=length, keys=length)


def test_it_is_chosen_where_queries_reach_little_of_what_there_is():
    kernels = installed().kernels
    assert choose(kernels, problem(1024)).name == "banded"
    assert choose(kernels, problem(1024, padded=True, has_positions=True)).name == "banded"
    assert choose(kernels, problem(16)).name == "plain"
    assert choose(kernels, problem(1024, Window(left=900))).name == "plain"
    assert choose(kernels, problem(4096, Window(left=255), score=ScaledDot())).name == "block_sparse"


@pytest.mark.parametrize("mask", [Window(left=4, right=None), Causal() | Window(left=2), ~Window(left=2)], ids=str)
def test_masks_without_a_bound_are_refused(mask):
    assert "reach: 0 is less than 1" in Banded().refusals(problem(1024, mask))


def test_keys_in_any_order_are_refused():
    refused = Banded().refusals(problem(1024, padded=True, has_positions=True, kv_unordered=True))
    assert [reason.partition(":")[0] for reason in refused] == ["kv_unordered"]


def local_m(score="general"):
    mechanism = installed().mechanisms.get("local_m")
    return mechanism, configure(mechanism, {"radius": 3, "score": score}, hidden_size=8, num_heads=2)


@pytest.mark.parametrize("score", ["general", "dot", "concat", "location"])
def test_local_m_multiplies_in_proportion_to_the_length(score):
    mechanism, config = local_m(score)
    layer = mechanism.build(config)
    counted = []
    for length in (256, 1024):
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(1, length, 8), torch.randn(1, length, 8)).sum().backward()
        counted.append(counter.get_total_flops())
    assert math.log(counted[1] / counted[0], 4) == pytest.approx(1, abs=0.02)


def test_a_step_of_local_m_reads_its_window_of_the_source():
    mechanism, config = local_m()
    layer = mechanism.build(config)
    counted = []
    for length in (2048, 8192):
        rows = torch.randn(1, 8)
        source = layer.encode(torch.randn(length, 8))["source"]
        operands = layer.operands(
            layer.project_query(rows)[:, None],
            {name: field[None] for name, field in source.items()},
            positions=(torch.tensor([[1000]]), None),
        )
        with FlopCounterMode(display=False) as counter:
            layer.attend_last(rows[:, None], operands)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]


@pytest.mark.parametrize(("queries", "keys"), [(5, 20), (20, 5), (1, 9), (9, 9)])
def test_the_price_counts_the_pairs_of_a_source_from_its_first_row(queries, keys):
    mechanism, config = local_m()
    seen = sum(abs(t - s) <= 3 for t in range(queries) for s in range(keys))
    found = mechanism.cost(config, Shape(query=queries, key=keys))
    assert found.flops - found.allowed_flops == (queries * keys - seen) * mechanism.spec(config).pair_flops()
