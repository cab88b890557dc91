"""The same over the processes of a `torch.distributed` group, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from attn_core import AttentionInputs, AttentionSpec
from attn_core.errors import Incompatible, InvalidValue
from torch import Tensor

from attn_variants.compute import plain
from attn_variants.parallel.deals import Deal
from attn_variants.parallel.ring import attend_parts, over_all
from attn_variants.parallel.ulysses import some_heads


class PassedOn(torch.autograd.Function):
    """Rows go to the next rank of a ring, and those of the one before come; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The rows of the rank before, of the same shape."""
        ctx.group = group
        return _sent(rows, group, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient that the next rank found."""
        return _sent(gradient, ctx.group, -1), None


class Exchanged(torch.autograd.Function):
    """Piece r of the first axis goes to rank r, and piece r comes from it; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The pieces [rank, ...] of all ranks."""
        ctx.group = group
        return _swapped(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradients to what was sent."""
        return _swapped(gradient, ctx.group), None


def ring_attend_here(spec: AttentionSpec, own: AttentionInputs, deal: Deal, group: dist.ProcessGroup) -> Tensor:
    """The output [batch, own token, heads, value_size] of this rank's queries over the keys of all ranks.

    `own` holds the rows of this rank's positions, as the deal says them. Raises as `ring_attend`, and `Incompatible`
    for padding, which does not travel.
    """
    rank = _place_in(group, deal.ranks, own)
    tokens = own.key.shape[1] * deal.ranks
    spec = over_all(spec, tokens, padded=False)
    placed = dataclasses.replace(own, query_positions=deal.places(rank, tokens).to(own.query.device)[None])

    def parts() -> Iterator[AttentionInputs]:
        rows = torch.cat([own.key, own.value], dim=-1)
        for step in range(deal.ranks):
            key, value = rows.split([own.key.shape[-1], own.value.shape[-1]], dim=-1)  # type: ignore[no-untyped-call]
            places = deal.places((rank - step) % deal.ranks, tokens).to(rows.device)
            yield dataclasses.replace(placed, key=key, value=value, key_positions=places[None])
            if step + 1 < deal.ranks:
                rows = PassedOn.apply(rows, group)  # type: ignore[no-untyped-call]

    return attend_parts(spec, parts())


def ulysses_attend_here(spec: AttentionSpec, own: AttentionInputs, group: dist.ProcessGroup) -> Tensor:
    """The output [batch, own token, heads, value_size] of this rank's piece of the sequence, the ranks' in order.

    Raises as `ulysses_attend`, and `Incompatible` for padding, which does not travel.
    """
    ranks = group.size()
    few = some_heads(spec, ranks)
    _place_in(group, ranks, own)
    query, key, value = (_tokens_for_heads(rows, group) for rows in (own.query, own.key, own.value))
    out = plain.attend(few, dataclasses.replace(own, query=query, key=key, value=value))
    pieces: Tensor = Exchanged.apply(torch.stack(out.tensor_split(ranks, dim=1)), group)  # type: ignore[no-untyped-call]
    return torch.cat(list(pieces), dim=2)


def _tokens_for_heads(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of this rank's heads, of this rank's tokens [batch, token, heads, size] of all heads."""
    pieces: Tensor = Exchanged.apply(torch.stack(rows.tensor_split(group.size(), dim=2)), group)  # type: ignore[no-untyped-call]
    return torch.cat(list(pieces), dim=1)


def _place_in(group: dist.ProcessGroup, ranks: int, own: AttentionInputs) -> int:
    if own.key_padding_mask is not None:
        raise Incompatible("attention over several processes takes no padding: give sequences of one length")
    if group.size() != ranks:
        raise InvalidValue.of("ranks", ranks, f"{group.size()}, the size of the process group")
    return group.rank()


def _sent(rows: Tensor, group: dist.ProcessGroup, by: int) -> Tensor:
    rows, came = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
    to, source = ((group.rank() + step) % group.size() for step in (by, -by))
    calls = [
        dist.P2POp(dist.isend, rows, group=group, group_peer=to),
        dist.P2POp(dist.irecv, came, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return came


def _swapped(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows, came = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(came, rows, group=group)
    return came
