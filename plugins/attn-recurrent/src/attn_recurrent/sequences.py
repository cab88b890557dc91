"""What layers with a matrix per head as state have in common: the short convolution, chunks, and decoding steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from attn_core import RaggedBatch
from attn_core.batch import Span
from attn_core.errors import InvalidValue
from attn_core.kernels.base import batch_invariant
from attn_core.kernels.recurrent_step import RecurrentStepDispatcher
from attn_core.masking import wide
from torch import Tensor
from torch.nn.functional import pad, silu

Parts = TypeVar("Parts", bound=Any)
"""A NamedTuple of tensors [batch, heads, tokens, size], one of which is `value`."""


def refuse_source(source: Tensor | None, mechanism: str) -> None:
    """Raise `InvalidValue` if a source is given."""
    if source is not None:
        raise InvalidValue.of("source", tuple(source.shape), f"None, as {mechanism!r} is self-attention")


def by_heads(rows: Tensor, heads: int) -> Tensor:
    """Reshape `rows` [batch, tokens, heads · size] to [batch, heads, tokens, size]."""
    return rows.reshape(*rows.shape[:-1], heads, rows.shape[-1] // heads).transpose(1, 2)


def convolved(rows: Tensor, filters: Tensor, bias: Tensor | None, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Like `filtered`, with SiLU after the convolution."""
    summed, tail = filtered(rows, filters, bias, tail)
    return silu(summed, inplace=not torch.is_grad_enabled()), tail


def filtered(rows: Tensor, filters: Tensor, bias: Tensor | None, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output of a causal convolution for `rows` [batch, tokens, channels], and its last taps - 1 inputs.

    `filters` [channels, taps] have the newest token last; `bias` is [channels]. `tail` [batch, taps - 1, channels] are
    the inputs before the rows, zeros if None.
    """
    tokens, filters = rows.shape[1], wide(filters).t().contiguous()
    taps = len(filters)
    known = pad(rows, (0, 0, taps - 1, 0)) if tail is None else torch.cat([tail.to(rows.dtype), rows], dim=1)
    summed = known[:, :tokens] * filters[0]
    if bias is not None:
        summed += wide(bias)
    for tap in range(1, taps):
        summed.addcmul_(known[:, tap : tap + tokens], filters[tap])
    return summed, known[:, tokens:]


def in_chunks(
    one_chunk: Callable[[Parts, Tensor], tuple[Tensor, Tensor]], parts: Parts, memory: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Outputs [batch, heads, tokens, size] and the memory after the last token, computed by `one_chunk` in chunks of
    `chunk` tokens: pairwise within a chunk, through the memory between chunks. Token by token where results must be
    batch-invariant."""
    tokens, chunk = parts.value.shape[2], 1 if batch_invariant() else chunk
    if tokens == 0:
        return parts.value, memory
    if tokens <= chunk:
        return one_chunk(parts, memory)
    outs = []
    for start in range(0, tokens, chunk):
        out, memory = one_chunk(type(parts)(*(part[:, :, start : start + chunk] for part in parts)), memory)
        outs.append(out)
    return torch.cat(outs, dim=2), memory


LEAST = {dtype: math.log(torch.finfo(dtype).tiny) + 16 for dtype in (torch.float32, torch.float64)}
"""The least sums of log decays: below them nothing is left that the sums of a matrix product would show."""


def faded(pairs: Tensor, total: Tensor, seen: Tensor | None = None, *, reach: int = 0) -> Tensor:
    """The `pairs` [batch, heads, tokens, tokens] of query i and key j times e^(seen_i - total_j) for j ≤ i + reach, and
    zero for others; `total` [batch, heads, tokens, 1] are sums of log decays, as are `seen`, the same if None."""
    passed = (total if seen is None else seen) - total.transpose(-1, -2)
    # Exponentials of infinity, and those below the least normal number, take processors many times as long; those of
    # later keys, above 0, could be infinite.
    return pairs.tril(reach) * passed.clamp(min=LEAST[passed.dtype], max=0).exp()


def stepped(
    plan: RecurrentStepDispatcher,
    query: Tensor,
    batch: RaggedBatch,
    view: Any,
    in_place: Callable[..., Tensor | None],
    compute: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]],
) -> Tensor:
    """The outputs of a step for the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

    Reads and replaces the state of `view`: "S", and "tail" if the convolution has one. `in_place(rows, view, request)`
    is the output of single tokens by a kernel that updates states in place, None if there is no such kernel;
    `compute(rows, memory, tail)` computes sequences of one length, and returns the state after them.
    """
    if batch.decoding and (out := in_place(query, view)) is not None:
        return out

    def single(span: Span, _: RaggedBatch) -> Tensor | None:
        return in_place(query[span.start : span.stop], view, span.request)

    done = {}
    if not batch.decoding:
        done = {span.request: out for span, out in plan.single_tokens(batch, single)}
    held = view.read()
    outs: list[Tensor] = []
    after: dict[str, list[Tensor]] = {name: [] for name in held}
    for rows, requests in pieces(query, batch):
        mine = {name: part[requests] for name, part in held.items()}
        if requests.start in done:
            outs.append(done[requests.start])
        else:
            out, memory, tail = compute(rows, mine["S"], mine.get("tail"))
            outs.append(out.flatten(0, 1))
            mine = {"S": memory, "tail": tail}
        for name, parts in after.items():
            parts.append(mine[name].to(held[name].dtype))
    view.write({name: torch.cat(parts) for name, parts in after.items()})
    return torch.cat(outs)


def pieces(rows: Tensor, batch: RaggedBatch) -> Iterator[tuple[Tensor, slice]]:
    """Split `rows` [tokens, hidden_size] into groups of sequences of the same length [requests, tokens, hidden_size],
    each with the slice of its requests.
    """
    if batch.decoding:
        yield rows[:, None], slice(0, batch.requests)
        return
    for span in batch.spans():
        yield rows[None, span.start : span.stop], slice(span.request, span.request + 1)
