from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionInputs, Heads, Step
from attn_core.cost import SelectedBlockPairs
from attn_core.errors import KernelRefused
from attn_core.kernels import dispatch
from attn_core.kernels.attend import AttendProblem
from attn_core.kernels.base import Anything
from attn_core.kernels.selected import (
    KeyBlocks,
    SelectedBlocks,
    SelectedBlocksDispatcher,
    SelectedBlocksKernel,
    SelectedBlocksProblem,
)

sizes = st.integers(1, 12)


@given(block=sizes, top=sizes, batch=st.integers(1, 3), keys=st.integers(0, 60), data=st.data())
def test_pairs_of_chosen_blocks_are_those_counted_query_by_query(block, top, batch, keys, data):
    queries = data.draw(st.integers(0, keys))
    pairs, shape = SelectedBlockPairs(block=block, top=top), Step(batch=batch, new=queries, remembered=keys - queries)
    places = range(keys - queries, keys)
    assert pairs.past(shape) == batch * sum(place // block for place in places)
    earlier = [min(top - 1, place // block) for place in places]
    assert pairs.allowed(shape) == batch * sum(
        place % block + 1 + block * count for place, count in zip(places, earlier, strict=True)
    )
    if queries == 1:
        assert pairs.met(shape) == batch * block * (earlier[0] + 1)
    if shape.whole:
        own = [min(block, keys - place // block * block) for place in places]
        assert pairs.met(shape) == batch * (sum(own) + block * sum(earlier))
    assert pairs.allowed(shape) <= pairs.met(shape)


class Anywhere(SelectedBlocksKernel):
    name = "anywhere"
    summary = "accepts everything"
    accepts = {field: Anything() for field in SelectedBlocksProblem.defaults()}

    def cost(self, problem):
        return 1.0

    def run(self, selected, blocks):
        return self.name


class Plainest(Anywhere):
    name = "plainest"
    accepts = {"key_size": Anything(), "value_size": Anything()}

    def cost(self, problem):
        return 0.5


def rows(*shape, requires_grad=False):
    return SimpleNamespace(
        shape=shape, dtype="torch.float32", device=SimpleNamespace(type="cpu"), requires_grad=requires_grad
    )


def read(plan, gradients=False, queries=6, **given):
    choices = SelectedBlocks(rows(1, 1, queries, 1, 4), rows(1, 1, queries, 2), rows(1, queries))
    blocks = KeyBlocks(rows(1, 1, 2, 3, 4, requires_grad=gradients), rows(1, 1, 2, 3, 4), rows(1, 2, 3))
    operands = AttentionInputs(query=rows(1, queries, 1, 4), key=rows(1, 6, 1, 4), value=rows(1, 6, 1, 4), **given)
    return plan.run(choices, blocks, operands)


@pytest.fixture
def plan():
    def of(*kernels):
        return SelectedBlocksDispatcher(kernels, Heads(query=1, key_value=1, key_size=4, value_size=4))

    return of


def test_the_cheapest_kernel_that_accepts_the_call_reads_chosen_blocks(plan):
    both = plan(Anywhere(), Plainest())
    assert read(both) == "plainest"
    assert read(both, gradients=True) == "anywhere"
    assert read(both, queries=2) == "anywhere"
    assert read(both, key_padding_mask=rows(1, 6)) == "anywhere"
    assert read(both, key_positions=rows(1, 6)) == "anywhere"


def test_where_nobody_reads_chosen_blocks_that_is_said(plan):
    with pytest.raises(KernelRefused, match=r"selected_blocks: plainest \(gradients: must be False, not True\)"):
        read(plan(Plainest()), gradients=True)


def test_a_kernel_of_chosen_blocks_is_no_kernel_of_specs():
    assert Anywhere().refusals(AttendProblem()) == ["operation: computes selected_blocks, not attend"]


class Unable(Plainest):
    name = "unable"

    def __init__(self, error):
        self.error = error
        self.tried = 0

    def cost(self, problem):
        return 0.1

    def unsupported(self, error):
        return "the chip is small" if isinstance(error, MemoryError) else None

    def run(self, selected, blocks):
        self.tried += 1
        raise self.error


def test_a_kernel_of_chosen_blocks_that_the_chip_cannot_run_gives_way_to_the_next_which_is_said_once(
    plan, monkeypatch, caplog
):
    monkeypatch.setattr(dispatch, "_said", set())
    unable = Unable(MemoryError())
    of = plan(unable, Plainest(), Anywhere())
    assert [read(of) for _ in range(3)] == ["plainest"] * 3
    assert unable.tried == 1
    assert [record.getMessage() for record in caplog.records] == [
        "kernel unable cannot run on this device, the next one is used instead: the chip is small"
    ]


def test_other_errors_of_a_kernel_of_chosen_blocks_are_raised(plan):
    with pytest.raises(ZeroDivisionError):
        read(plan(Unable(ZeroDivisionError()), Anywhere()))


def test_a_kernel_that_is_chosen_again_after_it_failed_as_in_a_graph_that_is_traced_raises_its_error(plan, monkeypatch):
    unable = Unable(MemoryError())
    of = plan(unable, Anywhere())
    # torch.compile makes a constant of the first choice.
    monkeypatch.setattr(of.operation, "index", lambda _below, _call: 0)
    with pytest.raises(MemoryError):
        read(of)
    assert unable.tried == 2
