"""Context parallelism: ring attention and Ulysses over sequences whose tokens are split between ranks."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
class Sharding(ABC):
    """The assignment of the tokens of a sequence to `ranks`, the same number for each."""

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InvalidValue.of("ranks", self.ranks, "a whole number from 1")

    def positions(self, rank: int, tokens: int) -> Tensor:
        """Positions [tokens / ranks], int64, of a rank; raises `InvalidValue` unless `ranks` divides `tokens`."""
        if tokens % self.ranks:
            raise InvalidValue.of("tokens", tokens, f"a multiple of the {self.ranks} ranks")
        return self.shard(rank, tokens // self.ranks)

    @abstractmethod
    def shard(self, rank: int, count: int) -> Tensor:
        """The positions [count], int64, of a rank that holds `count` tokens."""


@dataclass(frozen=True)
class Contiguous(Sharding):
    """Rank r holds the r-th consecutive part of the sequence (Liu et al. 2023, arXiv 2310.01889)."""

    def shard(self, rank: int, count: int) -> Tensor:
        """`count` consecutive positions."""
        return torch.arange(rank * count, (rank + 1) * count)


@dataclass(frozen=True)
class Striped(Sharding):
    """Tokens are dealt to the ranks in turn, which balances causal masks (Brandon et al. 2023, arXiv 2311.09431)."""

    def shard(self, rank: int, count: int) -> Tensor:
        """The positions p with p mod ranks = rank."""
        return torch.arange(count) * self.ranks + rank


def ring_attend(spec: AttentionSpec, operands: AttentionInputs, sharding: Sharding) -> Tensor:
    """Ring attention of all ranks, simulated in one process: outputs [batch, token, heads, value_size].

    Differentiable. Raises `Incompatible` for specs whose partial outputs cannot be merged, `InvalidValue` unless the
    ranks divide the tokens.
    """
    spec = whole_sequence_spec(spec, operands.key.shape[1], padded=operands.key_padding_mask is not None)
    held = sharded(operands, sharding)
    outs = [
        attend_parts(spec, (with_keys_of(own, held[source]) for source in ring_sources(rank, sharding.ranks)))
        for rank, own in enumerate(held)
    ]
    return gathered(outs, sharding)


def attend_parts(spec: AttentionSpec, parts: Iterable[AttentionInputs]) -> Tensor:
    """Outputs [batch, query, heads, value_size] over the keys of all parts, which have the same queries.

    Partial softmaxes are merged one part at a time (online softmax). Raises `Incompatible` if there are no parts.
    """
    rest = iter(parts)
    first = next(rest, None)
    if first is None:
        raise Incompatible("there are no parts to attend to: give at least one, which may be empty")
    whole = reduce(merged, (partial(spec, part) for part in rest), partial(spec, first))
    return whole.out.transpose(1, 2).to(first.value.dtype)


def ring_sources(rank: int, ranks: int) -> list[int]:
    """The rank whose keys and values `rank` attends to in each step: itself, then the ranks before it."""
    return [(rank - step) % ranks for step in range(ranks)]


def sharded(operands: AttentionInputs, sharding: Sharding) -> list[AttentionInputs]:
    """Split the inputs of whole sequences into those of each rank, with their positions."""
    positions = [
        sharding.positions(rank, operands.key.shape[1]).to(operands.key.device) for rank in range(sharding.ranks)
    ]
    return [
        dataclasses.replace(
            operands,
            query=operands.query[:, at],
            key=operands.key[:, at],
            value=operands.value[:, at],
            query_positions=at[None],
            key_positions=at[None],
            key_padding_mask=None if operands.key_padding_mask is None else operands.key_padding_mask[:, at],
        )
        for at in positions
    ]


def with_keys_of(own: AttentionInputs, other: AttentionInputs) -> AttentionInputs:
    """The inputs `own` with the keys and values of another rank."""
    return dataclasses.replace(
        own,
        key=other.key,
        value=other.value,
        key_positions=other.key_positions,
        key_padding_mask=other.key_padding_mask,
    )


def gathered(outs: Sequence[Tensor], sharding: Sharding) -> Tensor:
    """Concatenate the outputs [batch, token, ...] of all ranks, in the order of the sequence."""
    tokens = sum(out.shape[1] for out in outs)
    held = torch.cat([sharding.positions(rank, tokens) for rank in range(sharding.ranks)])
    return torch.cat(list(outs), dim=1)[:, held.argsort().to(outs[0].device)]


def whole_sequence_spec(spec: AttentionSpec, tokens: int, *, padded: bool) -> AttentionSpec:
    """The spec with its mask resolved for `tokens` keys; raises `Incompatible` if partial outputs cannot be merged."""
    why = None
    if spec.distribution.kind != "softmax":
        why = f"the distribution {spec.distribution.kind!r} is not softmax, so partial outputs cannot be merged"
    elif any(isinstance(modifier, RelativeValues) for modifier in spec.modifiers):
        why = "values that depend on the relative position cannot be merged"
    elif spec.cross:
        why = "cross-attention reads keys of another sequence, which is not split between ranks"
    elif padded and spec.mask.by_length:
        why = "the mask depends on the length of each padded sequence"
    if why is not None:
        raise Incompatible(f"context parallelism does not support this attention: {why}")
    return dataclasses.replace(spec, mask=spec.mask.over(tokens))


def pairs_by_step(mask: Mask, sharding: Sharding, tokens: int) -> list[list[int]]:
    """The number of query-key pairs that each rank computes in each step of the ring: [rank][step].

    The duration of a step is that of its busiest rank.
    """
    held = [sharding.positions(rank, tokens) for rank in range(sharding.ranks)]
    mask = mask.over(tokens)
    return [
        [int(mask.allows(own[:, None], held[source][None]).sum()) for source in ring_sources(rank, sharding.ranks)]
        for rank, own in enumerate(held)
    ]


FIELDS = ("query", "key", "value")


def ulysses_attend(spec: AttentionSpec, operands: AttentionInputs, ranks: int) -> Tensor:
    """Ulysses attention of all ranks, simulated in one process: outputs [batch, token, heads, value_size].

    Differentiable (Jacobs et al. 2023, arXiv 2309.14509). Raises `Incompatible` if heads differ in more than their
    projections, and `InvalidValue` unless the ranks divide both the key/value heads and the tokens.
    """
    few = rank_spec(spec, ranks)
    held = [{name: getattr(own, name) for name in FIELDS} for own in sharded(operands, Contiguous(ranks))]
    outs = [
        plain.attend(few, AttentionInputs(key_padding_mask=operands.key_padding_mask, **rank_heads(held, rank)))
        for rank in range(ranks)
    ]
    return torch.cat(outs, dim=2)


def rank_heads(held: Sequence[Mapping[str, Tensor]], rank: int) -> dict[str, Any]:
    """Queries, keys and values of all tokens, for the heads that a rank computes."""
    return {
        name: torch.cat([rows[name].tensor_split(len(held), dim=2)[rank] for rows in held], dim=1) for name in FIELDS
    }


def rank_spec(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    """The spec of the heads of one rank; raises the errors of `ulysses_attend`."""
    heads = spec.heads
    if ranks < 1 or heads.key_value % ranks or heads.per_group is None:
        raise InvalidValue.of("ranks", ranks, f"a divisor of the {heads.key_value} key/value heads, in equal groups")
    own = {"a mask of its own": spec.mask.heads is not None}
    own |= {"learned weights": bool(spec.weights)}
    own |= {"a bias of its own": any(not isinstance(modifier, SoftCap) for modifier in spec.modifiers)}
    for what, true in own.items():
        if true:
            raise Incompatible(f"heads cannot be split between ranks, as each head has {what}")
    few = dataclasses.replace(heads, query=heads.query // ranks, key_value=heads.key_value // ranks, groups=None)
    return dataclasses.replace(spec, heads=few)


class RingShift(torch.autograd.Function):
    """Send rows by `places` ranks along the ring and receive others; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, places: int = 1) -> Tensor:
        """The rows of the rank so many places before, of the same shape."""
        ctx.group, ctx.places = group, places
        return _shifted(rows, group, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient from the rank so many places behind."""
        return RingShift.apply(gradient, ctx.group, -ctx.places), None, None  # type: ignore[no-untyped-call]


class AllToAll(torch.autograd.Function):
    """All-to-all over the first axis: part r is exchanged with rank r, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The parts [rank, ...] received from all ranks."""
        ctx.group = group
        return _exchanged(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradients of the parts that were sent."""
        return AllToAll.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def ring_attend_distributed(
    spec: AttentionSpec, own: AttentionInputs, sharding: Sharding, group: dist.ProcessGroup
) -> Tensor:
    """Ring attention over a process group: outputs [batch, own token, heads, value_size] of this rank's queries.

    `own` are the inputs at this rank's positions under `sharding`. Raises the errors of `ring_attend`, and
    `Incompatible` if there is a padding mask, as masks are not exchanged between ranks.
    """
    rank = _checked_rank(group, sharding.ranks, own)
    tokens = own.key.shape[1] * sharding.ranks
    spec = whole_sequence_spec(spec, tokens, padded=False)
    located = dataclasses.replace(own, query_positions=sharding.positions(rank, tokens).to(own.query.device)[None])

    def parts() -> Iterator[AttentionInputs]:
        rows = torch.cat([own.key, own.value], dim=-1)
        for step in range(sharding.ranks):
            key, value = rows.split([own.key.shape[-1], own.value.shape[-1]], dim=-1)  # type: ignore[no-untyped-call]
            at = sharding.positions((rank - step) % sharding.ranks, tokens).to(rows.device)
            yield dataclasses.replace(located, key=key, value=value, key_positions=at[None])
            if step + 1 < sharding.ranks:
                rows = RingShift.apply(rows, group)  # type: ignore[no-untyped-call]

    return attend_parts(spec, parts())


def ulysses_attend_distributed(spec: AttentionSpec, own: AttentionInputs, group: dist.ProcessGroup) -> Tensor:
    """Ulysses attention over a process group: outputs [batch, own token, heads, value_size] of this rank's tokens.

    `own` are the inputs of this rank's consecutive part of the sequence. Raises the errors of `ulysses_attend`, and
    `Incompatible` if there is a padding mask, as masks are not exchanged between ranks.
    """
    ranks = group.size()
    few = rank_spec(spec, ranks)
    _checked_rank(group, ranks, own)
    query, key, value = (_tokens_for_heads(rows, group) for rows in (own.query, own.key, own.value))
    out = plain.attend(few, dataclasses.replace(own, query=query, key=key, value=value))
    pieces: Tensor = AllToAll.apply(torch.stack(out.tensor_split(ranks, dim=1)), group)  # type: ignore[no-untyped-call]
    return torch.cat(list(pieces), dim=2)


class ContextParallel:
    """The split of sequences over a process group; while `active`, layers compute ring attention over their ranks."""

    def __init__(self, sharding: Sharding, group: dist.ProcessGroup) -> None:
        self.sharding = sharding
        self.group = group
        self.active = False

    @contextmanager
    def splitting(self) -> Iterator[None]:
        """A context manager in which `active` is True: layer inputs are then this rank's tokens only."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def positions(self, count: int) -> Tensor:
        """Positions [count], int64, of the `count` tokens of a sequence that this rank holds."""
        return self.sharding.shard(self.group.rank(), count)

    def attend(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """See `ring_attend_distributed`."""
        return ring_attend_distributed(spec, operands, self.sharding, self.group)


def require_context_parallel(spec: AttentionSpec, tokens: int, ranks: int) -> None:
    """Raise `Incompatible` for a spec whose sequences cannot be split over ranks, and `InvalidValue` unless `ranks`
    divides the number of tokens."""
    whole_sequence_spec(spec, tokens, padded=False)
    if ranks < 1 or tokens % ranks:
        raise InvalidValue.of("cp", ranks, f"a divisor of the {tokens} tokens of a sequence")


def _tokens_for_heads(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's tokens [batch, token, heads, size] for this rank's heads of all tokens."""
    pieces: Tensor = AllToAll.apply(torch.stack(rows.tensor_split(group.size(), dim=2)), group)  # type: ignore[no-untyped-call]
    return torch.cat(list(pieces), dim=1)


def _checked_rank(group: dist.ProcessGroup, ranks: int, own: AttentionInputs) -> int:
    if own.key_padding_mask is not None:
        raise Incompatible("context parallelism does not support padding: give sequences of one length")
    if group.size() != ranks:
        raise InvalidValue.of("ranks", ranks, f"{group.size()}, the size of the process group")
    return group.rank()


def _shifted(rows: Tensor, group: dist.ProcessGroup, by: int) -> Tensor:
    if group.size() == 1:
        return rows.clone()
    rows, came = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
    to, source = ((group.rank() + step) % group.size() for step in (by, -by))
    calls = [
        dist.P2POp(dist.isend, rows, group=group, group_peer=to),
        dist.P2POp(dist.irecv, came, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return came


def _exchanged(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows, came = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(came, rows, group=group)
    return came
