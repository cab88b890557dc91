"""Products of queries and keys whose channels decay between them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


def decayed_pairs(query: Tensor, key: Tensor, faded: Tensor) -> Tensor:
    """The result of `by_halves`; in compiled code without its rounds, which are those of one number of tokens."""
    torch: Any = sys.modules["torch"]  # loaded by the caller; the contract itself needs no tensor library
    if not torch.compiler.is_compiling():
        return by_halves(query, key, faded)
    passed = (faded[..., :, None, :] - faded[..., None, :, :]).clamp(max=0).exp()
    pairs: Tensor = (query[..., :, None, :] * key[..., None, :, :] * passed).sum(-1).tril()
    return pairs


def by_halves(query: Tensor, key: Tensor, faded: Tensor) -> Tensor:
    """The decayed products Σ_c q_ic k_jc e^(faded_ic - faded_jc) at [i, j] for j ≤ i, and zero for j > i, by recursive
    halving; `faded` [..., tokens, channels] are sums of log decays, which are at most 0.

    For queries of the second half of a block and keys of the first, the decay between them is split at the middle, so
    that both factors are at most 1. Each half is computed in the same way, down to single tokens.
    """
    torch: Any = sys.modules["torch"]  # loaded by the caller; the contract itself needs no tensor library
    pad, tokens = torch.nn.functional.pad, query.shape[-2]
    padding = (1 << (tokens - 1).bit_length()) - tokens
    if padding:
        query, key = (pad(rows, (0, 0, 0, padding)) for rows in (query, key))
        last = faded[..., -1:, :].expand(*faded.shape[:-2], padding, faded.shape[-1])
        faded = torch.cat([faded, last], dim=-2)
    pairs = (query * key).sum(-1)[..., None, None]
    size = 1
    while size < tokens:
        pairs = _joined(pairs, *(_pairwise(rows, size) for rows in (query, key, faded)))
        size *= 2
    return pairs[..., 0, :tokens, :tokens]


def _pairwise(rows: Tensor, size: int) -> Tensor:
    """Reshape rows [..., tokens, channels] to pairs of blocks [..., blocks, 2, size, channels]."""
    *first, tokens, channels = rows.shape
    return rows.reshape(*first, tokens // (2 * size), 2, size, channels)


def _joined(pairs: Tensor, query: Tensor, key: Tensor, faded: Tensor) -> Tensor:
    """Merge the products within blocks, `pairs` [..., 2 blocks, size, size], into those of blocks twice as large.

    `query`, `key` and `faded` are [..., blocks, 2, size, channels].
    """
    torch: Any = sys.modules["torch"]  # loaded by the caller; the contract itself needs no tensor library
    middle = faded[..., 0, -1:, :]
    late = query[..., 1, :, :] * (faded[..., 1, :, :] - middle).exp()
    early = key[..., 0, :, :] * (middle - faded[..., 0, :, :]).exp()
    across = torch.matmul(late, early.transpose(-1, -2))
    first, second = pairs[..., 0::2, :, :], pairs[..., 1::2, :, :]
    upper = torch.cat([first, torch.zeros_like(across)], dim=-1)
    joined: Tensor = torch.cat([upper, torch.cat([across, second], dim=-1)], dim=-2)
    return joined
