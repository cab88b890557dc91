"""Attention over sequences whose tokens are split between ranks: ring attention and Ulysses."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from attn_core import AttentionInputs, AttentionSpec, Mask
from attn_core.errors import Incompatible, InvalidValue
from attn_core.modifiers import RelativeValues, SoftCap
from torch import Tensor

from attn_variants.compute import plain
from attn_variants.compute.merging import merged, partial


@dataclass(frozen=True)
class Deal(ABC):
    """Which positions each of `ranks` holds; all hold equally many."""

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InvalidValue.of("ranks", self.ranks, "a whole number from 1")

    def places(self, rank: int, tokens: int) -> Tensor:
        """The positions of a rank, int64; raises `InvalidValue` where the tokens cannot be dealt equally."""
        if tokens % self.ranks:
            raise InvalidValue.of("tokens", tokens, f"a multiple of the {self.ranks} ranks")
        return self.dealt(rank, tokens // self.ranks)

    @abstractmethod
    def dealt(self, rank: int, count: int) -> Tensor:
        """The positions of a rank where every one has `count`."""


@dataclass(frozen=True)
class Contiguous(Deal):
    """One piece of the sequence after the other (Liu et al. 2023, arXiv 2310.01889)."""

    def dealt(self, rank: int, count: int) -> Tensor:
        """The rank's piece."""
        return torch.arange(rank * count, (rank + 1) * count)


@dataclass(frozen=True)
class Striped(Deal):
    """In turn, a token each, so that a causal mask leaves all ranks alike to do (Brandon et al. 2023, 2311.09431)."""

    def dealt(self, rank: int, count: int) -> Tensor:
        """Every position that leaves the rank when divided by the ranks."""
        return torch.arange(count) * self.ranks + rank


def ring_attend(spec: AttentionSpec, operands: AttentionInputs, deal: Deal) -> Tensor:
    """The output [batch, token, heads, value_size] of whole sequences as the ranks of a ring find it, in one process.

    Gradients flow through it. Raises `Incompatible` for a spec whose parts cannot be merged, `InvalidValue` for tokens
    that cannot be dealt equally.
    """
    spec = over_all(spec, operands.key.shape[1], padded=operands.key_padding_mask is not None)
    held = handed_out(operands, deal)
    outs = [
        attend_parts(spec, (meeting(own, held[source]) for source in sources(rank, deal.ranks)))
        for rank, own in enumerate(held)
    ]
    return in_order(outs, deal)


def attend_parts(spec: AttentionSpec, parts: Iterable[AttentionInputs]) -> Tensor:
    """The output [batch, query, heads, value_size] of the same queries over keys that come part by part."""
    rest = iter(parts)
    first = next(rest, None)
    if first is None:
        raise Incompatible("attention over no part has no output: give at least one, which may be empty")
    whole = reduce(merged, (partial(spec, part) for part in rest), partial(spec, first))
    return whole.out.transpose(1, 2).to(first.value.dtype)


def sources(rank: int, ranks: int) -> list[int]:
    """Whose keys and values a rank meets, step by step: its own, then those of the ranks before it."""
    return [(rank - step) % ranks for step in range(ranks)]


def handed_out(operands: AttentionInputs, deal: Deal) -> list[AttentionInputs]:
    """What each rank holds of whole sequences, with the positions."""
    dealt = [deal.places(rank, operands.key.shape[1]).to(operands.key.device) for rank in range(deal.ranks)]
    return [
        dataclasses.replace(
            operands,
            query=operands.query[:, places],
            key=operands.key[:, places],
            value=operands.value[:, places],
            query_positions=places[None],
            key_positions=places[None],
            key_padding_mask=None if operands.key_padding_mask is None else operands.key_padding_mask[:, places],
        )
        for places in dealt
    ]


def meeting(own: AttentionInputs, other: AttentionInputs) -> AttentionInputs:
    """The queries of one rank and the keys and values of another."""
    return dataclasses.replace(
        own,
        key=other.key,
        value=other.value,
        key_positions=other.key_positions,
        key_padding_mask=other.key_padding_mask,
    )


def in_order(outs: Sequence[Tensor], deal: Deal) -> Tensor:
    """Rows [batch, token, ...] of all ranks as they stand in the sequence."""
    tokens = sum(out.shape[1] for out in outs)
    held = torch.cat([deal.places(rank, tokens) for rank in range(deal.ranks)])
    return torch.cat(list(outs), dim=1)[:, held.argsort().to(outs[0].device)]


def over_all(spec: AttentionSpec, tokens: int, *, padded: bool) -> AttentionSpec:
    """The spec for parts of so many tokens; raises `Incompatible` where they cannot be merged."""
    why = None
    if spec.distribution.kind != "softmax":
        why = f"the distribution {spec.distribution.kind!r} has no sum of exponentials"
    elif any(isinstance(modifier, RelativeValues) for modifier in spec.modifiers):
        why = "values that differ from pair to pair are not in the sum"
    elif spec.cross:
        why = "its keys are of a source, which is not dealt"
    elif padded and spec.mask.by_length:
        why = "its mask depends on the length of each sequence"
    if why is not None:
        raise Incompatible(f"attention in parts over several ranks: {why}")
    return dataclasses.replace(spec, mask=spec.mask.over(tokens))


def pairs_by_step(mask: Mask, deal: Deal, tokens: int) -> list[list[int]]:
    """How many pairs each rank computes in each step of the ring: [rank][step].

    A step takes as long as the rank that has most to do.
    """
    held = [deal.places(rank, tokens) for rank in range(deal.ranks)]
    mask = mask.over(tokens)
    return [
        [int(mask.allows(own[:, None], held[source][None]).sum()) for source in sources(rank, deal.ranks)]
        for rank, own in enumerate(held)
    ]


FIELDS = ("query", "key", "value")


def ulysses_attend(spec: AttentionSpec, operands: AttentionInputs, ranks: int) -> Tensor:
    """The output [batch, token, heads, value_size] of whole sequences as ranks of some heads find it, in one process.

    Gradients flow through it. Raises `Incompatible` where heads differ by more than their projections, `InvalidValue`
    where ranks divide neither the key/value heads nor the tokens (Jacobs et al. 2023, arXiv 2309.14509).
    """
    few = some_heads(spec, ranks)
    held = [{name: getattr(own, name) for name in FIELDS} for own in handed_out(operands, Contiguous(ranks))]
    outs = [
        plain.attend(few, AttentionInputs(key_padding_mask=operands.key_padding_mask, **of_heads(held, rank)))
        for rank in range(ranks)
    ]  # Back: each rank's tokens with all heads; here the ranks' pieces lie side by side at once.
    return torch.cat(outs, dim=2)


def of_heads(held: Sequence[Mapping[str, Tensor]], rank: int) -> dict[str, Any]:
    """What a rank receives: all tokens, from every rank its own, of the heads that are its part."""
    return {
        name: torch.cat([rows[name].tensor_split(len(held), dim=2)[rank] for rows in held], dim=1) for name in FIELDS
    }


def some_heads(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    """The spec of the heads of one rank; see `ulysses_attend` for what it raises."""
    heads = spec.heads
    if ranks < 1 or heads.key_value % ranks or heads.per_group is None:
        raise InvalidValue.of("ranks", ranks, f"a divisor of the {heads.key_value} key/value heads, in equal groups")
    own = {"a mask of its own": spec.mask.heads is not None}
    own |= {"learned weights": bool(spec.weights)}
    own |= {"a bias of its own": any(not isinstance(modifier, SoftCap) for modifier in spec.modifiers)}
    for what, true in own.items():
        if true:
            raise Incompatible(f"heads cannot be dealt to ranks: each head has {what}")
    few = dataclasses.replace(heads, query=heads.query // ranks, key_value=heads.key_value // ranks, groups=None)
    return dataclasses.replace(spec, heads=few)


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
