"""Products of queries and keys that fade with the decay between them, lower triangular.

Shapes: rows [..., tokens, size]; `faded` [..., tokens, size or 1] is the sum of the log decays up to each token, itself
included; results [..., tokens, tokens]. No exponential of a positive number is taken, so nothing overflows however
strong the decay is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def faded_pairs(query: Tensor, key: Tensor, faded: Tensor | None) -> Tensor:
    """Entry [i, j] is Σ_c q_ic k_jc e^(faded_ic - faded_jc) for j ≤ i and zero for j > i."""
    if faded is None or query.shape[-2] == 0:
        return torch.matmul(query, key.transpose(-1, -2)).tril_()
    if faded.shape[-1] > 1:
        return by_halves(query, key, faded)
    # Later keys, whose exponent is above 0, are set aside before the exponential, which could be infinite there.
    left = (faded - faded.transpose(-1, -2)).clamp(max=0).exp()
    return torch.matmul(query, key.transpose(-1, -2)).tril_() * left


def by_halves(query: Tensor, key: Tensor, faded: Tensor) -> Tensor:
    """The pairs where each channel fades on its own.

    Queries of the second half of a block meet keys of the first; what fades between them is split at the middle, so
    that both factors are at most 1. Halves are treated alike, down to single tokens.
    """
    tokens = query.shape[-2]
    padding = (1 << (tokens - 1).bit_length()) - tokens
    if padding:
        query, key = (torch.nn.functional.pad(rows, (0, 0, 0, padding)) for rows in (query, key))
        last = faded[..., -1:, :].expand(*faded.shape[:-2], padding, faded.shape[-1])
        faded = torch.cat([faded, last], dim=-2)
    pairs = (query * key).sum(-1)[..., None, None]
    size = 1
    while size < tokens:
        pairs = _joined(pairs, *(_pairwise(rows, size) for rows in (query, key, faded)))
        size *= 2
    return pairs[..., 0, :tokens, :tokens]


def _pairwise(rows: Tensor, size: int) -> Tensor:
    """[..., blocks, 2, size, channels] of rows [..., tokens, channels]."""
    *first, tokens, channels = rows.shape
    return rows.reshape(*first, tokens // (2 * size), 2, size, channels)


def _joined(pairs: Tensor, query: Tensor, key: Tensor, faded: Tensor) -> Tensor:
    """Pairs of blocks [..., blocks, size, size] as those of blocks twice as large.

    Rows are [..., blocks, 2, size, channels].
    """
    middle = faded[..., 0, -1:, :]
    late = query[..., 1, :, :] * (faded[..., 1, :, :] - middle).exp()
    early = key[..., 0, :, :] * (middle - faded[..., 0, :, :]).exp()
    across = torch.matmul(late, early.transpose(-1, -2))
    first, second = pairs[..., 0::2, :, :], pairs[..., 1::2, :, :]
    upper = torch.cat([first, torch.zeros_like(across)], dim=-1)
    return torch.cat([upper, torch.cat([across, second], dim=-1)], dim=-2)
