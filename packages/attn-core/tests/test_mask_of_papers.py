"""Numbers and statements of the papers about their masks."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import Causal, Full, Window
from attn_core.errors import InvalidValue
from attn_core.masks import (
    BigBird,
    BlockSparse,
    Chunked,
    ChunkRing,
    Dense,
    Fixed,
    Graph,
    Neighbourhood,
    NeighbourhoodGrid,
    Prefix,
    Segments,
    Strided,
    Summaries,
    Tree,
)


def seen(mask, query, keys):
    return [key for key in range(keys) if mask.over(keys).allows(query, key)]


def test_cl_40_a_window_of_two_keeps_19_of_49_scores_and_dilated_17():
    assert Window(left=1, right=1).count(7, 7) == 19
    assert Window(left=1, right=1, dilation=2).count(7, 7) == 17


def test_a_window_does_not_wrap_around_at_the_ends():
    assert seen(Window(left=4, right=4), 0, 3) == [0, 1, 2]
    assert Window(left=4, right=4).count(3, 3) == 9


def test_cl_41_strided_pairs_grow_as_n_to_the_three_halves():
    counts = {n: Strided(math.isqrt(n)).count(n, n) for n in (256, 1024, 4096)}
    assert counts == {256: 5896, 1024: 48144, 4096: 389152}
    assert math.log(counts[4096] / counts[256], 16) == pytest.approx(1.51, abs=0.005)


def test_the_strided_pattern_of_the_paper():
    assert seen(Strided(4).local, 10, 16) == [6, 7, 8, 9, 10]
    assert seen(Strided(4).column, 10, 16) == [2, 6, 10]
    assert seen(Strided(4), 10, 16) == [2, 6, 7, 8, 9, 10]


def test_cl_41_summaries_of_a_block_of_128_are_its_last_8_cells():
    assert seen(Summaries(block=128, cells=8), 200, 256) == list(range(120, 128))
    assert seen(Summaries(block=128, cells=8, shift=1), 200, 256) == list(range(112, 120))
    assert seen(Fixed(block=128, summaries=8), 200, 256) == [*range(120, 128), *range(128, 201)]


@pytest.mark.parametrize("cells", [8, 16, 32])
def test_rows_of_the_fixed_pattern_are_never_empty(cells):
    mask = Fixed(block=64, summaries=cells)
    assert all(mask.runs(row, 200) for row in range(200))


@pytest.mark.parametrize("mask", [Strided(4), Strided(5), Fixed(block=4, summaries=1), Fixed(block=6, summaries=2)])
def test_cl_41_every_position_reaches_every_later_one_in_two_steps(mask):
    keys = 30
    one = [set(seen(mask, row, keys)) for row in range(keys)]
    for row in range(keys):
        two = set().union(*(one[middle] for middle in one[row]))
        assert two == set(range(row + 1))


@given(st.integers(1, 9), st.integers(1, 12))
def test_a_neighbourhood_always_has_its_size_and_holds_the_query(size, keys):
    mask = Neighbourhood(size=size)
    for query in range(keys):
        found = seen(mask, query, keys)
        start = min(max(query - size // 2, 0), max(keys - size, 0))
        assert found == list(range(start, start + min(size, keys)))
        assert query in found


def test_a_dilated_neighbourhood_has_its_size_among_positions_of_its_residue():
    mask = Neighbourhood(size=3, dilation=2)
    assert [seen(mask, query, 8) for query in (0, 1, 4, 7)] == [[0, 2, 4], [1, 3, 5], [2, 4, 6], [3, 5, 7]]


def test_a_neighbourhood_of_a_plane_has_its_size_squared_and_is_shifted_at_the_edges():
    mask = NeighbourhoodGrid(size=3, rows=4, columns=5)
    assert all(len(seen(mask, query, 20)) == 9 for query in range(20))
    assert seen(mask, 0, 20) == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert seen(mask, 12, 20) == [6, 7, 8, 11, 12, 13, 16, 17, 18]
    assert seen(mask, 19, 20) == [7, 8, 9, 12, 13, 14, 17, 18, 19]


def test_cl_52_the_strict_mask_leaves_the_first_row_empty():
    strict = Causal() & ~Window(left=0, right=0)
    assert [seen(strict, query, 3) for query in range(3)] == [[], [0], [0, 1]]


@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 60), st.integers(0, 9))
def test_random_blocks_of_big_bird_are_as_many_as_asked_and_overlap_with_nothing(block, number, more, seed):
    keys = (5 + 2 * number) * block + more
    mask = BigBird(block=block, random=number, seed=seed, number_of_heads=2).of_head(1).over(keys)
    last = (keys - 1) // block
    for row in range(1, last):
        columns = {key // block for key in range(keys) if mask.allows(row * block, key)}
        fixed = {0, last, row - 1, row, row + 1}
        assert fixed <= columns
        assert len(columns - fixed) == number
    for row in (0, last):
        assert mask.runs(row * block, keys) == [(0, keys)]


def test_random_blocks_of_big_bird_differ_by_head_and_seed_and_are_spread_evenly():
    keys, drawn = 64, Counter()
    for seed in range(16):
        for head in range(4):
            mask = BigBird(block=1, random=2, seed=seed, number_of_heads=4).of_head(head).over(keys)
            for row in range(10, 50):
                drawn.update((key - row) % keys for key in seen(mask, row, keys) if abs(key - row) > 1 and 0 < key < 63)
    rows = 16 * 4 * 40
    # Each key is a candidate of nearly every row, and 2 of 59 are drawn.
    assert all(drawn[distance] < 2 * 2 * rows / 59 for distance in drawn)
    assert len(drawn) > 55


def test_parts_of_big_bird_add_up_to_the_whole_and_random_blocks_do_not_depend_on_the_others():
    keys, made = 40, {"block": 2, "seed": 3, "number_of_heads": 2}
    window, ends, alone, whole = (
        {(q, k) for q in range(keys) for k in seen(BigBird(**made, **part).of_head(1), q, keys)}
        for part in (
            {"random": 0, "ends": False},
            {"random": 0, "window": False},
            {"random": 2, "window": False, "ends": False},
            {"random": 2},
        )
    )
    assert whole == window | ends | alone
    assert window == {(q, k) for q in range(keys) for k in range(keys) if abs(q // 2 - k // 2) <= 1}
    assert all(sum(q == row for q, _ in alone) == 2 + 2 * 2 for row in range(2, keys - 2))


def test_few_keys_are_all_seen_by_big_bird_as_in_the_authors_code():
    mask = BigBird(block=2, random=1).of_head(0)
    assert mask.count(14, 14) == 14 * 14
    assert mask.count(15, 15) < 15 * 15


def test_packed_documents_see_themselves_only():
    mask = Segments((2, 0, 3)) & Causal()
    assert [seen(mask, query, 6) for query in range(6)] == [[0], [0, 1], [2], [2, 3], [2, 3, 4], []]


def test_chunks_of_llama_4_are_causal_inside():
    mask = Chunked(size=3) & Causal()
    assert [seen(mask, query, 5) for query in range(5)] == [[0], [0, 1], [0, 1, 2], [3], [3, 4]]
    assert mask.lookback == 2


def test_before_the_first_chunk_of_a_ring_stands_the_last():
    ring = ChunkRing(size=2).over(7)
    assert [seen(ring, query, 7) for query in range(7)] == [
        [0, 1, 6],
        [0, 1, 6],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [2, 3, 4, 5],
        [2, 3, 4, 5],
        [4, 5, 6],
    ]
    assert seen(ChunkRing(size=2, back=0, ahead=1).over(7), 6, 7) == [0, 1, 6]
    assert seen(ChunkRing(size=8, back=3).over(7), 0, 7) == list(range(7))


def test_attention_sinks_are_a_window_and_the_first_positions():
    mask = Window(left=2) | Prefix(2) & Causal()
    assert seen(mask, 7, 9) == [0, 1, 5, 6, 7]
    assert seen(mask, 0, 9) == [0]


def test_a_node_of_a_tree_sees_its_path_and_the_context():
    tree = Tree((-1, 0, 0, 2, -1), context=2)
    assert [seen(tree, query, 7) for query in range(7)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 4],
        [0, 1, 2, 4, 5],
        [0, 1, 6],
    ]
    assert tree.causal


@given(st.integers(0, 8))
def test_a_chain_is_causal_and_a_complete_graph_is_full(nodes):
    chain = Tree(tuple(range(-1, nodes - 1)))
    complete = Graph.of(nodes, [(i, j) for i in range(nodes) for j in range(nodes)])
    one_block = BlockSparse(max(nodes, 1), ((0,),))
    for query in range(nodes):
        assert chain.runs(query, nodes) == Causal().runs(query, nodes)
        assert complete.runs(query, nodes) == one_block.runs(query, nodes) == Full().runs(query, nodes)


def test_an_isolated_node_sees_nothing():
    assert Graph.of(3, [(0, 1), (1, 0)]).runs(2, 3) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tree((1, 0)), r"tree\.parents.*no cycle such as \[0, 1, 0\]"),
        (lambda: Tree((0,)), r"tree\.parents.*no cycle"),
        (lambda: Tree((-2,)), r"tree\.parents.*-1 for a root"),
        (lambda: Graph.of(2, [(0, 2)]), r"graph\.edges: \(0, 2\)"),
        (lambda: Graph(((1,),)), r"graph\.neighbours\[0\]"),
        (lambda: BlockSparse(2, ((1,),)), r"blocks\.rows\[0\]"),
        (lambda: BlockSparse(0, ()), r"blocks\.block: 0"),
        (lambda: Dense.of([[1], [1, 0]]), r"dense\.rows"),
        (lambda: Fixed(block=4, summaries=5), r"fixed\.summaries: 5 is not allowed; allowed: at most the block's 4"),
        (lambda: Summaries(block=4, cells=2, shift=2), r"fixed\.summaries: 6"),
        (lambda: Strided(0), r"strided\.stride: 0"),
        (lambda: Chunked(size=0), r"chunked\.size: 0"),
        (lambda: ChunkRing(size=0), r"chunk_ring\.size: 0"),
        (lambda: ChunkRing(size=1, back=-1), r"chunk_ring\.back: -1"),
        (lambda: Neighbourhood(size=0), r"neighbourhood\.size: 0"),
        (lambda: Neighbourhood(size=3, dilation=0), r"neighbourhood\.dilation: 0"),
        (lambda: NeighbourhoodGrid(size=3, rows=0, columns=2), r"neighbourhood\.rows: 0"),
        (lambda: BigBird(random=-1), r"big_bird\.random: -1"),
        (lambda: Segments((3, -1)), r"segments\.lengths: -1"),
        (lambda: BigBird(block=2.5), r"big_bird\.block: 2\.5"),
    ],
)
def test_a_mask_that_means_nothing_is_refused_by_the_name_of_its_field(make, message):
    with pytest.raises(InvalidValue, match=message):
        make()
