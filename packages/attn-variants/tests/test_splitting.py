"""Splits of layers over ranks: what each rank has, and what is refused. That ranks add up is a law of the kit."""

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import Incompatible, InvalidValue
from attn_core.modifiers import Alibi
from attn_core.splitting import OUTPUT_BIAS, ParameterSplit, Rank, rank_config, rank_layer

SIZES = {"hidden_size": 32, "num_heads": 8}


def built(name, options=(), **shared):
    mechanism = installed().mechanisms.get(name)
    torch.manual_seed(0)
    return mechanism.build(configure(mechanism, dict(options), **{**SIZES, **shared}))


def parts_of(layer, ranks):
    return [rank_layer(layer, Rank(rank, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("mha", {"bias": True}),
        ("gqa", {"num_kv_heads": 4}),
        ("mqa", {}),
        ("kda", {}),
        ("mla", {}),
        ("gated_deltanet", {}),
    ],
)
def test_the_parts_of_all_ranks_make_the_whole_again(name, shared, ranks):
    layer = built(name, **shared)
    parts = parts_of(layer, ranks)
    for key, tensor in layer.state_dict().items():
        split = parts[0][1][key]
        assert torch.equal(split.whole([part.state_dict()[key] for part, _ in parts]), tensor), key


def test_matrices_into_heads_are_split_by_columns_and_the_output_by_rows():
    layer = built("gqa", num_kv_heads=4, bias=True)
    (first, splits), (second, _) = parts_of(layer, 2)
    assert torch.equal(second.query.weight, layer.query.weight[16:])
    assert torch.equal(second.key.weight, layer.key.weight[8:])
    assert torch.equal(first.output.weight, layer.output.weight[:, :16])
    assert {name: split.axis for name, split in splits.items() if "weight" in name} == {
        "query.weight": 0,
        "key.weight": 0,
        "value.weight": 0,
        "output.weight": 1,
    }
    assert splits[OUTPUT_BIAS].once
    assert not second.output.bias.any()


def test_queries_keys_and_values_that_lie_side_by_side_are_split_each():
    split = ParameterSplit(0, ((4, 2), (4, 2), (8, 4), (3, 3)))
    assert split.indices(Rank(1, 2)) == [2, 3, 6, 7, 12, 13, 14, 15, 16, 17, 18]
    assert split.shared
    whole = torch.randn(19, 2)
    parts = [split.of(whole, Rank(rank, 2)) for rank in range(2)]
    assert torch.equal(split.whole(parts), whole)


def test_heads_of_a_rank_keep_their_slopes():
    assert [Alibi(heads_of=rank_heads(rank)).slopes(2) for rank in range(3)] == [
        Alibi().slopes(6)[first : first + 2] for first in (0, 2, 4)
    ]


def rank_heads(rank):
    mechanism = installed().mechanisms.get("alibi")
    config = configure(mechanism, {}, hidden_size=12, num_heads=6)
    return rank_config(mechanism, config, Rank(rank, 3)).heads_of


@pytest.mark.parametrize(
    ("name", "shared", "ranks", "message"),
    [
        ("mha", {}, 3, "tp: 3 is not allowed; allowed: a divisor of the 8 query heads of mechanism 'mha'"),
        ("gqa", {"num_kv_heads": 2}, 4, "of the 8 query heads and of the 2 key/value heads of mechanism 'gqa'"),
        ("gated_deltanet", {}, 16, "tp: 16"),
    ],
)
def test_ranks_that_do_not_divide_the_heads_are_refused(name, shared, ranks, message):
    with pytest.raises(InvalidValue, match=message):
        rank_layer(built(name, **shared), Rank(0, ranks))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lightning", (), "'lightning' cannot be split over 2 ranks: it does not declare"),
        ("dilated_window", (), "'dilated_window' cannot be split over 2 ranks: each head has a mask of its own"),
        ("gqa", {"groups": (0, 0, 0, 1, 1, 1, 1, 1)}, "'gqa' cannot be split over 2 ranks: .* unequal groups"),
    ],
)
def test_heads_that_are_not_apart_are_refused_with_the_mechanism_and_the_reason(name, options, message):
    with pytest.raises(Incompatible, match=message):
        rank_layer(built(name, options), Rank(0, 2))


def test_the_part_of_a_part_and_a_rank_that_is_none_are_refused():
    with pytest.raises(Incompatible, match="split already"):
        rank_layer(rank_layer(built("mha"), Rank(0, 2))[0], Rank(0, 2))
    with pytest.raises(InvalidValue, match="2 of 2"):
        Rank(2, 2)
