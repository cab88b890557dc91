"""Tokens of trees over pages, as an engine gives them: each a request for itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core import RaggedBatch, Window
from attn_core.batch import RowsInPlace
from attn_core.distributions import SoftmaxWithSink
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.modifiers import Alibi, T5Bias
from attn_kernels_triton.paged.attend import attend_rows
from attn_kernels_triton.paged.host_plan import draft_trees_of
from bounds import require_close
from test_paged import POOL, Step, by_definition

BRAIN = torch.bfloat16
CHAIN, FORK = (-1, 0, 1), (-1, -1, 0, 0, 1, 3)
WIDE = (-1, *(0 for _ in range(40)))
"""Parents of each token; one more tree than a word has bits."""


def path_of(parents: tuple[int, ...], node: int) -> list[int]:
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


def operands_of(
    step: Step, trees: list[tuple[int, tuple[int, ...]]], decoding: tuple[int, ...] = ()
) -> PagedAttentionInputs:
    """Requests of trees after so many rows, and of plain tokens behind them."""
    generator = torch.Generator().manual_seed(1)
    free = torch.randperm(POOL, generator=generator).tolist()
    contexts, paths, lines = [], [], []
    for base, parents in trees:
        before, own = [free.pop() for _ in range(base)], [free.pop() for _ in parents]
        for node in range(len(parents)):
            path = path_of(parents, node)
            contexts.append(base + len(path) - 1)
            paths.append(tuple(base + place for place in path))
            lines.append(before + [own[place] for place in path])
    for context in decoding:
        contexts.append(context)
        paths.append(None)
        lines.append([free.pop() for _ in range(context + 1)])
    left = step.mask.lookback
    firsts = [0 if left is None else max(0, context - left) for context in contexts]
    if left is not None:
        bases = [base for base, parents in trees for _ in parents]
        firsts = [max(0, base - left) for base in bases] + firsts[len(bases) :]
    longest = max(len(line) - first for line, first in zip(lines, firsts, strict=True))
    numbers = [line[first:] + [-7] * (longest - len(line) + first) for line, first in zip(lines, firsts, strict=True)]
    lengths = (1,) * len(contexts)
    drawn = step._replace(lengths=(1,), contexts=(0,)).operands()
    query = torch.randn(len(contexts), step.heads[0], step.sizes[0], generator=generator, dtype=torch.float64)
    return PagedAttentionInputs(
        query=query.to(step.dtype),
        batch=RaggedBatch.of(lengths, contexts, torch.tensor, paths),
        rows=RowsInPlace(drawn.rows.fields, torch.zeros(0), torch.tensor(numbers), tuple(firsts)),
        requests=tuple(range(len(contexts))),
        parameters=drawn.parameters,
    )


STEPS = {
    "a chain": (Step(), [(40, CHAIN)], ()),
    "a fork beside tokens": (Step(dtype=BRAIN), [(130, FORK)], (20, 0)),
    "nothing before the tree": (Step(), [(0, FORK)], (9,)),
    "two trees": (Step(heads=(2, 2)), [(40, FORK), (7, CHAIN)], (3,)),
    "more tokens than a word has bits": (Step(heads=(2, 1)), [(70, WIDE)], ()),
    "a window": (Step(mask=Window(left=9)), [(40, FORK)], (30,)),
    "a window shorter than the tree": (Step(mask=Window(left=1)), [(40, CHAIN)], ()),
    "biases of positions with sinks": (
        Step(modifiers=(Alibi(), T5Bias()), distribution=SoftmaxWithSink()),
        [(40, FORK)],
        (),
    ),
    "latents": (Step(heads=(4, 1), sizes=(40, 32), latent=True), [(40, FORK)], (9,)),
}


@pytest.mark.parametrize("name", STEPS)
def test_tokens_of_a_tree_see_their_ancestors_and_what_is_before_the_tree(name):
    step, trees, decoding = STEPS[name]
    operands = operands_of(step, trees, decoding)
    drafts = draft_trees_of(operands)
    assert drafts is not None
    assert [tree.tokens for tree in drafts.trees] == [len(parents) for _, parents in trees]
    exact, plain = (by_definition(step.spec, operands, dtype) for dtype in (torch.float64, step.dtype))
    require_close(attend_rows(step.spec, operands), plain, exact, name)


def test_what_is_before_a_tree_is_read_once_for_all_its_tokens():
    step, trees, decoding = STEPS["a fork beside tokens"]
    drafts = draft_trees_of(operands_of(step, trees, decoding))
    assert drafts is not None
    assert drafts.numbers.shape == (1, 136)
    assert drafts.requests == frozenset(range(6))


def test_a_tree_whose_ancestors_are_not_all_in_the_step_is_met_token_by_token():
    step, trees, _ = STEPS["a chain"]
    operands = dataclasses.replace(operands_of(step, trees), requests=(1, 2))
    assert draft_trees_of(operands) is None
    expected = by_definition(step.spec, operands, step.dtype)
    torch.testing.assert_close(attend_rows(step.spec, operands)[1:], expected[1:], rtol=1e-5, atol=1e-6)


def test_tokens_that_remember_other_rows_are_not_taken_for_one_tree():
    step, trees, _ = STEPS["a chain"]
    operands = operands_of(step, trees)
    numbers = operands.rows.kv_indices.clone()
    numbers[1, 3] = int(numbers[0, 4])
    operands = dataclasses.replace(operands, rows=dataclasses.replace(operands.rows, kv_indices=numbers))
    assert draft_trees_of(operands) is None
    expected = by_definition(step.spec, operands, step.dtype)
    torch.testing.assert_close(attend_rows(step.spec, operands), expected, rtol=1e-5, atol=1e-6)
