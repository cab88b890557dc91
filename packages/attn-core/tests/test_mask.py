"""Everything that follows from a mask agrees with its predicate, pair by pair."""

import dataclasses
import importlib.util
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import Causal, Full, Mask, Window
from attn_core.errors import InvalidValue
from attn_core.masks import (
    BigBird,
    BlockSparse,
    Chunked,
    ChunkRing,
    Dense,
    Fixed,
    GlobalKeys,
    GlobalTokens,
    Graph,
    Neighbourhood,
    NeighbourhoodGrid,
    PerHead,
    Predicate,
    Prefix,
    Segments,
    Strided,
    Summaries,
    Tree,
    blocks,
    pinned_positions,
)
from attn_core.modifiers import DependencyTree

POSITIONS = range(-4, 14)
LENGTH = 14

bounds = st.none() | st.integers(0, 6)
windows = st.builds(
    lambda left, right, step: Window(left=left, right=right, dilation=step), bounds, bounds, st.integers(1, 4)
)
leaves = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    windows,
    st.builds(Prefix, st.integers(0, 8)),
    st.just(Predicate(lambda query, key: (query + key) % 3 == 0)),
    st.just(Predicate(lambda query, key: (key <= query + 1) & (key >= query - 2), back=2, ahead=1)),
)
small = st.integers(1, 5)
nodes = st.integers(0, 7)
edges = st.lists(st.tuples(nodes, nodes), max_size=12)
trees = st.lists(st.integers(0, 30), max_size=6).map(lambda draws: tuple(d % (i + 1) - 1 for i, d in enumerate(draws)))
patterns = st.one_of(
    st.builds(GlobalKeys, st.lists(nodes, max_size=3).map(tuple)),
    st.builds(GlobalTokens, st.lists(nodes, max_size=3).map(tuple)),
    st.builds(lambda size, back, ahead: Chunked(size=size, back=back, ahead=ahead), small, nodes, nodes),
    st.builds(lambda size, back, ahead: ChunkRing(size=size, back=back, ahead=ahead), small, nodes, nodes),
    st.builds(Strided, small),
    st.builds(lambda cells, more: Fixed(block=cells + more, summaries=cells), small, nodes),
    st.builds(lambda cells, shift: Summaries(block=12, cells=cells, shift=shift), st.integers(1, 4), st.integers(0, 2)),
    st.builds(lambda size, step: Neighbourhood(size=size, dilation=step), small, st.integers(1, 3)),
    st.builds(
        lambda size, step, rows, columns: NeighbourhoodGrid(size=size, dilation=step, rows=rows, columns=columns),
        small,
        st.integers(1, 2),
        small,
        small,
    ),
    st.builds(
        lambda block, number, head, window, ends: BigBird(
            block=block, random=number, seed=7, number_of_heads=3, window=window, ends=ends
        ).of_head(head),
        st.integers(1, 2),
        st.integers(0, 2),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Segments, st.lists(st.integers(0, 6), max_size=4).map(tuple)),
    st.builds(lambda found: Graph.of(8, found), edges),
    st.builds(Tree, trees, st.integers(0, 5)),
    st.builds(lambda rows: Dense.of(rows), st.lists(st.lists(st.booleans(), min_size=5, max_size=5), max_size=6)),
    st.builds(
        lambda rows: BlockSparse(2, tuple(tuple(key for key in row if key < len(rows)) for row in rows)),
        st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    ),
)
masks = st.recursive(
    leaves | patterns,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=4,
)
sizes = st.tuples(st.integers(0, 9), st.integers(0, 9))


def allowed_pairs(mask, queries, keys):
    """The pairs by brute force: query i of n over S keys stands at S - n + i."""
    bound = mask.over(keys)
    return {(q, k) for q in range(keys - queries, keys) for k in range(keys) if bound.allows(q, k)}


@given(masks, sizes)
def test_count_is_the_number_of_allowed_pairs(mask, size):
    queries, keys = size
    assert mask.count(queries, keys) == len(allowed_pairs(mask, queries, keys))


@given(masks, sizes)
def test_keys_of_covers_every_key_that_a_query_sees_and_stays_among_the_keys(mask, size):
    queries, keys = size
    for query, key in allowed_pairs(mask, queries, keys):
        assert key in mask.keys_of(query, keys)
    for query in range(keys - queries, keys):
        assert set(mask.keys_of(query, keys)) <= set(range(keys))


@given(masks)
def test_lookback_and_lookahead_bound_what_is_seen(mask):
    mask = mask.over(LENGTH)
    for query in POSITIONS:
        for key in range(LENGTH):
            if mask.allows(query, key):
                assert mask.lookback is None or query - key <= mask.lookback
                assert mask.lookahead is None or key - query <= mask.lookahead


@given(masks, st.sampled_from([None, LENGTH]))
def test_what_a_decoder_keeps_holds_every_key_that_is_seen(mask, context):
    kept = mask.reach(context)
    assert list(kept.positions) == sorted(set(kept.positions))
    mask = mask.over(LENGTH)
    for query in range(LENGTH):
        for key in range(query + 1):
            if mask.allows(query, key):
                assert kept.window is None or query - key < kept.window or key in kept.positions


@pytest.mark.parametrize(
    ("mask", "context", "window", "pinned"),
    [
        (Window(left=3) | Prefix(2), None, 4, [0, 1]),
        (Window(left=3) | (Prefix(2) & Causal()), None, 4, [0, 1]),
        ((Window(left=3) | Prefix(2)) & Causal() & Segments((5, 20)), None, 4, [0, 1]),
        (Window(left=2) | GlobalKeys((7, 0)), None, 3, [0, 7]),
        ((Window(left=2) | GlobalTokens((0, 3))) & Causal(), None, 3, [0, 1, 2, 3]),
        (Window(left=3) & Window(left=5) | Prefix(1), None, 4, [0]),
        (PerHead((Window(left=1), Window(left=4) | Prefix(3))), None, 5, [0, 1, 2]),
        (Causal() | Prefix(4), None, None, []),
        (Fixed(block=4, summaries=1), None, None, []),
        (Fixed(block=4, summaries=1), 10, 4, [3, 7]),
        (Strided(4), 10, None, []),
        (~(Window(left=3) | Prefix(2)), 10, None, []),
    ],
)
def test_unions_of_bounded_pieces_are_kept_by_the_piece(mask, context, window, pinned):
    kept = mask.reach(context)
    assert (kept.window, list(kept.positions)) == (window, pinned)
    assert pinned_positions(mask, len(pinned)) == tuple(pinned)


@given(masks)
def test_a_causal_mask_shows_nothing_later(mask):
    if mask.causal:
        bound = mask.over(LENGTH)
        assert not any(bound.allows(q, k) for q in POSITIONS for k in range(LENGTH) if k > q)


@given(masks, masks)
def test_and_or_and_not_mean_what_they_mean_for_pairs(one, other):
    one, other = one.over(LENGTH), other.over(LENGTH)
    for q in POSITIONS:
        for k in POSITIONS:
            a, b = bool(one.allows(q, k)), bool(other.allows(q, k))
            assert bool((one & other).allows(q, k)) == (a and b)
            assert bool((one | other).allows(q, k)) == (a or b)
            assert bool((~one).allows(q, k)) == (not a)


@given(masks, masks, sizes)
def test_de_morgan_holds(one, other, size):
    assert (~(one & other)).count(*size) == ((~one) | (~other)).count(*size)
    assert (~(one | other)).count(*size) == ((~one) & (~other)).count(*size)


@given(masks, sizes)
def test_the_runs_of_a_query_are_the_keys_it_sees(mask, size):
    queries, keys = size
    bound = mask.over(keys)
    for query in range(keys - queries, keys):
        runs = bound.runs(query, keys)
        assert all(0 <= start < stop <= keys for start, stop in runs)
        assert all(stop < following for (_, stop), (following, _) in itertools.pairwise(runs))
        assert [key for start, stop in runs for key in range(start, stop)] == [
            key for key in range(keys) if bound.allows(query, key)
        ]


@given(masks, sizes, st.integers(1, 5))
def test_blocks_are_empty_partial_or_full_as_their_pairs_are(mask, size, block):
    queries, keys = size
    layout = blocks(mask, queries, keys, block)
    pairs = {(q - keys + queries, k) for q, k in allowed_pairs(mask, queries, keys)}
    for row, start in enumerate(range(0, queries, block)):
        for column, first in enumerate(range(0, keys, block)):
            inside = [
                (q, k)
                for q in range(start, min(start + block, queries))
                for k in range(first, min(first + block, keys))
            ]
            seen = sum(pair in pairs for pair in inside)
            assert (column in layout.full[row]) == (seen == len(inside))
            assert (column in layout.partial[row]) == (0 < seen < len(inside))


@given(masks, sizes)
def test_a_mask_and_its_negation_share_out_all_pairs(mask, size):
    assert mask.count(*size) + (~mask).count(*size) == size[0] * size[1]


@given(masks)
def test_tensors_of_positions_give_what_integers_give(mask):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed, and attn-core does not need it")
    import torch

    mask = mask.over(LENGTH)
    places = torch.tensor(list(POSITIONS))
    dense = mask.allows(places[:, None], places[None, :])
    assert dense.dtype == torch.bool
    assert dense.shape == (len(POSITIONS), len(POSITIONS))
    assert dense.tolist() == [[bool(mask.allows(q, k)) for k in POSITIONS] for q in POSITIONS]


def test_a_window_of_mistral_sees_w_keys_with_itself():
    mistral = Causal() & Window(left=3)
    assert [k for k in range(10) if mistral.allows(7, k)] == [4, 5, 6, 7]
    assert mistral.lookback == 3
    assert mistral.causal


def test_a_dilated_window_sees_every_second_key():
    dilated = Window(left=2, right=1, dilation=2)
    assert [k for k in range(12) if dilated.allows(6, k)] == [2, 4, 6, 8]


def test_a_causal_mask_over_more_keys_is_aligned_at_the_bottom_right():
    assert [Causal().allows(3 + i, k) for i in range(2) for k in range(5)] == [True] * 4 + [False] + [True] * 5


def test_masks_that_say_the_same_are_equal_and_hash_alike():
    assert (Causal() & Window(left=3)) == (Causal() & Window(left=3))
    assert hash(Causal() | Prefix(2)) == hash(Causal() | Prefix(2))
    assert Window(left=3) != Window(left=4)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("left", {"left": -1}), ("right", {"left": 1, "right": -2}), ("dilation", {"left": 1, "dilation": 0})],
)
def test_a_window_that_means_nothing_is_refused_by_the_name_of_its_field(field, wrong):
    with pytest.raises(InvalidValue, match=rf"window\.{field}: -?\d is not allowed"):
        Window(**wrong)


WITH_TUPLES = {
    Segments: {"lengths": (2, 3)},
    Graph: {"neighbours": ((0,), (0, 1))},
    BlockSparse: {"block": 2, "rows": ((0,), (0, 1))},
    Tree: {"parents": (-1, 0, 0)},
    GlobalKeys: {"positions": (0, 4)},
    GlobalTokens: {"positions": (0, 4)},
    Dense: {"rows": (b"\1\0", b"\1\1")},
    PerHead: {"masks": (Causal(), Full())},
    DependencyTree: {"heads": (-1, 0)},
}


def as_lists(value):
    return [as_lists(part) for part in value] if isinstance(value, tuple) else value


def test_every_mask_with_tuples_is_tried():
    kinds = [Mask]
    for kind in kinds:
        kinds += kind.__subclasses__()
    own = [kind for kind in kinds if dataclasses.is_dataclass(kind) and kind.__module__.startswith("attn_core")]
    has = {kind for kind in own if any(str(field.type).startswith("tuple") for field in dataclasses.fields(kind))}
    assert has == WITH_TUPLES.keys() - {DependencyTree}


@pytest.mark.parametrize("kind", WITH_TUPLES, ids=lambda kind: kind.__name__)
def test_lists_are_as_good_as_tuples(kind):
    given = WITH_TUPLES[kind]
    from_lists = kind(**{name: as_lists(value) for name, value in given.items()})
    assert from_lists == kind(**given)
    assert hash(from_lists) == hash(kind(**given))
