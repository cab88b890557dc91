"""Tokens of a tree, of which each is a request for itself, put together again: what is before the tree is read once."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from attn_core import RaggedBatch
from attn_core.kernels.paged import PagedOperands
from torch import Tensor

from attn_kernels_triton.launch import integers
from attn_kernels_triton.paged.items import Asked

WORD = 32


class Node(NamedTuple):
    """A request that computes one token of a tree: `base` rows lie before the tree, `rows` are its ancestors' and own.

    `last` is the row before the tree, -1 where there is none.
    """

    request: int
    base: int
    first: int
    last: int
    rows: tuple[int, ...]


class Grove(NamedTuple):
    """Trees whose tokens are computed side by side.

    `numbers` [tree, place] are rows in memory from position `firsts[tree]` on, those of its tokens last, from position
    `bases[tree]` on. Bit b of word w of `seen` [token of the step, words], int32, says that a token sees that of number
    32 w + b of its tree.
    """

    asked: tuple[Asked, ...]
    requests: frozenset[int]
    numbers: Tensor
    firsts: Tensor
    bases: Tensor
    seen: Tensor


def grove_of(operands: PagedOperands) -> Grove | None:
    """The trees of a step; None where there is none, or none of two tokens that lie as they must."""
    batch, numbers = operands.batch, operands.rows.numbers
    trees = [tree for tree in trees_of(operands) if len(tree) > 1 and complete(tree)]
    trees = [tree for tree, same in zip(trees, same_before(trees, numbers), strict=True) if same]
    if not trees:
        return None
    longest = max(tree[0].base - tree[0].first + len(tree) for tree in trees)
    table = numbers.new_zeros(len(trees), longest)
    seen = torch.zeros(sum(batch.lengths), -(-max(map(len, trees)) // WORD), dtype=torch.int64)
    begins = [span.start for span in batch.spans()]
    for place, tree in enumerate(trees):
        before = tree[0].base - tree[0].first
        table[place, :before] = numbers[tree[0].request, :before]
        own = [node.rows[-1] for node in tree]
        table[place, before : before + len(tree)] = torch.tensor(own, device=numbers.device)
        order = {row: number for number, row in enumerate(own)}
        for node in tree:
            for number in (order[row] for row in node.rows):
                seen[begins[node.request], number // WORD] |= 1 << number % WORD
    seen = torch.where(seen >= 1 << 31, seen - (1 << 32), seen)
    return Grove(
        asked=tuple(
            Asked(place, begins[tree[0].request], len(tree), tree[0].base, tree=True)
            for place, tree in enumerate(trees)
        ),
        requests=frozenset(node.request for tree in trees for node in tree),
        numbers=table,
        firsts=integers([tree[0].first for tree in trees], numbers),
        bases=integers([tree[0].base for tree in trees], numbers),
        seen=seen.to(numbers.device, torch.int32),
    )


def trees_of(operands: PagedOperands) -> list[list[Node]]:
    """Neighbouring tokens of trees after the same row, as far as they are asked for."""
    nodes = nodes_of(operands)
    found = []
    for _, some in groupby(enumerate(nodes), lambda pair: (pair[1].request - pair[0], *pair[1][1:4])):
        found.append([node for _, node in some])
    return found


def nodes_of(operands: PagedOperands) -> list[Node]:
    """The requests that compute one token of a tree, with the numbers of the rows from the one before the tree on."""
    batch, rows = operands.batch, operands.rows
    found = [request for request in sorted(set(operands.requests)) if is_node(batch, request)]
    if not found:
        return []
    bases = [batch.contexts[request] + 1 - len(batch.path(request)) for request in found]
    depth = max(len(batch.path(request)) for request in found)
    starts = torch.tensor([base - rows.firsts[request] for request, base in zip(found, bases, strict=True)])
    places = (starts[:, None] + torch.arange(-1, depth)).clamp(0, rows.numbers.shape[1] - 1).to(rows.numbers.device)
    near = rows.numbers[torch.tensor(found, device=places.device)[:, None], places].tolist()
    return [
        Node(
            request,
            base,
            rows.firsts[request],
            line[0] if base > rows.firsts[request] else -1,
            tuple(line[1 : 1 + len(batch.path(request))]),
        )
        for request, base, line in zip(found, bases, near, strict=True)
    ]


def is_node(batch: RaggedBatch, request: int) -> bool:
    """Whether a request computes one token of a tree."""
    return bool(batch.path(request)) and batch.lengths[request] == 1


def complete(tree: list[Node]) -> bool:
    """Whether the ancestors of all tokens are among them, each in a row of its own."""
    own = {node.rows[-1] for node in tree}
    return len(own) == len(tree) and all(own.issuperset(node.rows) for node in tree)


def same_before(trees: list[list[Node]], numbers: Tensor) -> list[bool]:
    """For each tree, whether all its tokens have the same rows before the tree."""
    same = []
    for tree in trees:
        before = numbers[tree[0].request : tree[-1].request + 1, : tree[0].base - tree[0].first]
        same.append((before == before[:1]).all())
    return torch.stack(same).tolist() if same else []
