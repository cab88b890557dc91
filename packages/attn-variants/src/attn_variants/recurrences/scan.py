"""Prefixes of a linear recurrence over chunks: I_c = T_c I_{c-1} + own_c, where nothing is before the first.

Shapes: transitions T [batch or 1, chunks, heads, ...] and `own` [batch, chunks, heads, key_size, value_size]. `product`
applies one transition to another or to a memory: `torch.mul` for decays [..., key_size or 1, 1], `torch.matmul` for
matrices [..., key_size, key_size].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def prefixes(transition: Tensor, own: Tensor, product: Product) -> Tensor:
    """The memory I after every chunk, in the shape of `own`."""
    # A loop over chunks would be captured anew for every length.
    prefix = by_doubling if torch.compiler.is_compiling() else one_by_one
    return prefix(transition, own, product)


def one_by_one(transition: Tensor, own: Tensor, product: Product) -> Tensor:
    """The prefixes with the least work: one product a chunk."""
    memories = [own[:, 0]]
    for chunk in range(1, own.shape[1]):
        memories.append(product(transition[:, chunk], memories[-1]) + own[:, chunk])
    return torch.stack(memories, dim=1)


def by_doubling(transition: Tensor, own: Tensor, product: Product) -> Tensor:
    """The prefixes in as many rounds as the number of chunks can be halved (Hillis & Steele 1986)."""
    reach = 1
    while reach < own.shape[1]:
        own = own + product(transition, _shifted(own, reach))
        transition = product(transition, _shifted(transition, reach))
        reach *= 2
    return own


def _shifted(rows: Tensor, places: int) -> Tensor:
    """Rows [batch, chunks, ...] moved by some chunks, with zeros before them."""
    padded = torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 2) + (places, 0))
    return padded[:, : rows.shape[1]]
