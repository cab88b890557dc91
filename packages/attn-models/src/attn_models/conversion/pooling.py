"""One projection for a group of key/value heads."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from attn_models.conversion.groups import HeadMap
from attn_models.decoder.initial import STANDARD

Method = Literal["mean", "first", "random"]
METHODS: tuple[Method, ...] = get_args(Method)


def pooled(weight: Tensor, heads: HeadMap, method: Method, generator: torch.Generator) -> Tensor:
    """The weight [groups · size, ...] of pooled heads from that of the old, [heads · size, ...].

    `mean` is the least-squares fit of a group; `first` takes its first head; `random` draws anew, N(0, 0.02²), for
    comparison, and zeros for biases (Ainslie et al. 2023, arXiv 2305.13245, section 2.1 and figure 4).
    """
    old = by_head(weight, len(heads.groups))
    if method == "random":
        shape = (heads.count, *old.shape[1:])
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * STANDARD
        return (drawn if weight.ndim > 1 else drawn * 0).to(weight.dtype).flatten(0, 1)
    chosen = [old[heads.members(group)] for group in range(heads.count)]
    new = [group.double().mean(0) if method == "mean" else group[0] for group in chosen]
    return torch.stack(new).to(weight.dtype).flatten(0, 1)


def energy_kept(weight: Tensor, new: Tensor, heads: HeadMap) -> tuple[float, float]:
    """The squared norm of `weight` [heads · size, ...], and how far the pooled `new` is from it, squared."""
    old = by_head(weight.double(), len(heads.groups))
    repeated = by_head(new.double(), heads.count)[list(heads.groups)]
    return old.square().sum().item(), (old - repeated).square().sum().item()


def by_head(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · size, ...] as [heads, size, ...]."""
    return rows.reshape(heads, -1, *rows.shape[1:])
