"""Ulysses: ranks exchange tokens for heads, attend to all tokens with some heads, and exchange back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.errors import Incompatible, InvalidValue
from attn_core.modifiers import SoftCap
from torch import Tensor

from attn_variants.compute import plain
from attn_variants.parallel.deals import Contiguous
from attn_variants.parallel.ring import handed_out

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
    ]
    # Back: each rank's tokens with all heads; here the ranks' pieces lie side by side at once.
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
