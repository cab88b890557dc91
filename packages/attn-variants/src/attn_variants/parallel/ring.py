"""Ring attention: queries stay with their rank, keys and values go round, and what they give is merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from attn_core import AttentionInputs, AttentionSpec, Mask
from attn_core.errors import Incompatible
from attn_core.modifiers import RelativeValues
from torch import Tensor

from attn_variants.compute.merging import merged, partial
from attn_variants.parallel.deals import Deal


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
