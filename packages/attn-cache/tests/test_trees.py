"""Tokens of a tree behind what a request remembers: each sees its ancestors, as it would alone."""

from __future__ import annotations

import pytest
import torch
from attn_cache import ContiguousCache, Int8Cache, KiviCache, PagedCache, SharedCache
from attn_core import Field, Paged, RaggedBatch, Slot, Source
from attn_core.errors import InvalidValue, WrongState
from attn_core.masks import Tree
from attn_core.stores import StoreSize, TreeStore
from hypothesis import given, settings
from hypothesis import strategies as st

WINDOW = 5
SPECS = {
    "full": {"kv": Paged({"key": Field((2, 3)), "value": Field((2, 5))})},
    "near": {"kv": Paged({"x": Field((4,))}, window=WINDOW)},
    "cross": {"source": Source({"memory": Field((3,))})},
}
FAMILIES = pytest.mark.parametrize(
    "family", [ContiguousCache(), PagedCache(), SharedCache(), Int8Cache()], ids=lambda family: family.name
)
SIZE = StoreSize(tokens=240, requests=3)
PARENTS = st.lists(st.integers(0, 100), min_size=1, max_size=9).map(
    lambda drawn: tuple(number % (node + 1) - 1 for node, number in enumerate(drawn))
)


def rows_of(state: str, tokens: int) -> dict[str, torch.Tensor]:
    (spec,) = SPECS[state].values()
    return {name: torch.randn(tokens, *field.shape) for name, field in spec.fields.items()}


class Twice:
    """A store that holds trees, and one in which each of their paths is written alone."""

    def __init__(self, family) -> None:
        self.family = family
        self.store = family.create(SPECS, SIZE)
        self.written = {
            state: {name: rows[:0] for name, rows in rows_of(state, 1).items()} for state in ("full", "near")
        }
        # Another request lies first, so that places are not positions.
        for name, length in ((7, 3), (1, 4)):
            self.store.admit(name)
            self.store.write_source(name, {"cross": {"source": {"memory": torch.full((2, 3), float(name))}}})
            self.store.reserve(name, 60)
            views = self.store.view(batch([length], [0]), [name])
            for state in ("full", "near"):
                rows = rows_of(state, length)
                views[state]["kv"].append(rows)
                if name == 1:
                    self.written[state] = rows

    @property
    def context(self) -> int:
        return len(self.written["near"]["x"])

    def tree(self, parents: tuple[int, ...]) -> None:
        """Write a token and a tree behind it; every token of it must see what it would see on its path alone."""
        known, paths = self.context, [Tree(parents).path(node)[::-1] for node in range(len(parents))]
        lie = [tuple(known + 1 + node for node in path) for path in paths]
        contexts = [known, *(known + len(path) for path in paths)]
        step = RaggedBatch.of([1] * len(contexts), contexts, torch.tensor, [None, *lie])
        views = self.store.view(step, [1] * len(contexts))
        new = {state: rows_of(state, len(contexts)) for state in ("full", "near")}
        for state, rows in new.items():
            views[state]["kv"].append(rows)
        nodes = [[0], *([0, *(1 + node for node in path)] for path in paths)]
        for state, rows in new.items():
            for asked in (range(len(nodes)), range(len(nodes) - 1, -1, -1), [len(nodes) - 1]):
                self._compare(state, views[state]["kv"].rows(asked), [nodes[place] for place in asked], rows)
            self._compare_in_place(views[state]["kv"], state, nodes, rows)
        assert (views["cross"]["source"].rows(range(len(nodes))).fields["memory"] == 1).all()
        kept = nodes[-1][1:]
        self.store.accept_path(1, known + 1, [known + node for node in kept])
        for state, rows in new.items():
            found = {name: torch.cat([self.written[state][name], given[[0, *kept]]]) for name, given in rows.items()}
            self.written[state] = found

    def _alone(self, state: str, path: list[int], rows: dict[str, torch.Tensor]):
        store = self.family.create(SPECS, SIZE)
        store.admit(0)
        store.write_source(0, {"cross": {"source": {"memory": torch.zeros(2, 3)}}})
        store.reserve(0, self.context + len(path))
        whole = {name: torch.cat([self.written[state][name], given[path]]) for name, given in rows.items()}
        for place in range(self.context + len(path)):
            view = store.view(batch([1], [place]), [0])[state]["kv"]
            view.append({name: given[place : place + 1] for name, given in whole.items()})
        return view

    def _compare(self, state, read, paths, rows) -> None:
        for row, path in enumerate(paths):
            alone = self._alone(state, path, rows).rows([0])
            key_padding_mask = (
                torch.ones_like(read.positions[row], dtype=torch.bool)
                if read.key_padding_mask is None
                else read.key_padding_mask[row]
            )
            assert read.positions[row][key_padding_mask].tolist() == alone.positions[0].tolist()
            for name, expected in alone.fields.items():
                assert torch.equal(read.fields[name][row][key_padding_mask], expected[0])

    def _compare_in_place(self, view, state, paths, rows) -> None:
        if not hasattr(view, "in_place"):
            return
        lie = view.in_place()
        for row, path in enumerate(paths):
            alone = self._alone(state, path, rows).rows([0])
            numbers = lie.kv_indices[row][: alone.positions.shape[1]]
            for name, expected in alone.fields.items():
                assert torch.equal(lie.fields[name][numbers], expected[0])


def batch(lengths: list[int], contexts: list[int]) -> RaggedBatch:
    return RaggedBatch.of(lengths, contexts, torch.tensor)


@FAMILIES
@settings(max_examples=8, deadline=None)
@given(trees=st.lists(PARENTS, min_size=1, max_size=3))
def test_a_token_of_a_tree_sees_what_it_would_see_on_its_path_alone(family, trees) -> None:
    """Rows, positions and places in memory, tree after tree, each kept as far as its last path."""
    twice = Twice(family)
    for parents in trees:
        twice.tree(parents)


@FAMILIES
def test_a_tree_leaves_the_others_of_its_step_alone(family) -> None:
    """A request that decodes beside a tree reads what it reads without one."""
    store = Twice(family).store
    step = RaggedBatch.of([1, 1, 1, 1], [3, 4, 5, 5], torch.tensor, [None, None, (5,), (6,)])
    views = store.view(step, [7, 1, 1, 1])
    views["full"]["kv"].append(rows_of("full", 4))
    assert views["full"]["kv"].rows([0]).positions.tolist() == [[0, 1, 2, 3]]
    assert views["full"]["kv"].rows([2, 3]).positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert (views["cross"]["source"].rows([0, 1]).fields["memory"][:, 0, 0]).tolist() == [7, 1]


@pytest.mark.parametrize(
    ("family", "specs", "words"),
    [
        (SharedCache(), SPECS | {"sums": {"total": Slot({"s": Field((2,))})}}, "sums.total has a fixed size"),
        (KiviCache(), SPECS, "blocks are quantized"),
    ],
    ids=["slot", "kivi"],
)
def test_what_cannot_hold_a_tree_says_why(family, specs, words) -> None:
    """States of fixed size exist once a request, and codes of a block are final."""
    store = family.create(specs, StoreSize(tokens=256, requests=2))
    assert isinstance(store, TreeStore)
    assert words in (store.tree_unsupported_reason() or "")
    store.admit(0)
    store.reserve(0, 4)
    with pytest.raises(WrongState, match=words):
        store.view(RaggedBatch.of([1, 1], [0, 0], torch.tensor, [(0,), (1,)]), [0, 0])
    with pytest.raises(WrongState, match=words):
        store.accept_path(0, 0, [1])


@FAMILIES
def test_a_path_that_is_none_is_refused(family) -> None:
    """Slots ascend, and none of them lies before the tree; a tree's token needs room of its own."""
    store = Twice(family).store
    assert store.tree_unsupported_reason() is None
    for slots in ([5, 4], [5, 5], [3, 4]):
        with pytest.raises(InvalidValue, match="slots"):
            store.accept_path(1, 4, slots)
    with pytest.raises(WrongState, match="needed"):
        store.view(RaggedBatch.of([1], [4], torch.tensor, [(200,)]), [1])
    with pytest.raises(InvalidValue, match="different requests"):
        store.view(batch([1, 1], [4, 4]), [1, 1])
