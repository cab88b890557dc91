"""Mamba-2 whose past is cut at powers of two: o_t = Σ_j λ_(t, l(t, j)) (C_t · B_j) e^(g_(j+1) + ... + g_t) v_j.

The level l(t, j) of token j for token t is the number of binary digits of t xor j, at most the last level. Tokens of
one level are one bucket: the k-th binary digit of t says whether there is a bucket of 2^k tokens before it, of which
the larger are the earlier. A token more is a carry, in which buckets become one.

Shapes as in `attn_recurrent.mamba2.duality`, with memories [batch, heads, bucket, state_size, head_dim].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_recurrent.mamba2.duality import System
from attn_recurrent.mamba2.duality import weights as without_levels


class Leveled(NamedTuple):
    """The inputs of `System`, λ as `scale` [batch, heads, tokens, levels], and `place` [batch, 1, tokens, 1], int64,
    the positions of the tokens."""

    reading: Tensor
    writing: Tensor
    value: Tensor
    decay: Tensor
    scale: Tensor
    place: Tensor

    def levels(self, apart: Tensor) -> Tensor:
        """The levels, int64, of tokens for those from whose positions theirs differ in the binary digits `apart`."""
        sizes = 1 << torch.arange(self.scale.shape[-1] - 1, device=self.place.device)
        return torch.bucketize(apart, sizes, right=True)

    def scales(self, levels: Tensor) -> Tensor:
        """λ of each token for the `levels` [batch, 1, tokens, n]: [batch, heads, tokens, n]."""
        return self.scale.gather(-1, levels.expand(-1, self.scale.shape[1], -1, -1))


def weights(system: Leveled) -> Tensor:
    """The weights of the values, [batch, heads, tokens, tokens]."""
    levels = system.levels(system.place ^ system.place.transpose(-1, -2))
    return without_levels(System(*system[:4])) * system.scales(levels)


def one_chunk(system: Leveled, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and memory after one chunk of tokens."""
    heads, buckets = memory.shape[1:3]
    group_size = heads // system.reading.shape[1]
    total = system.decay.cumsum(2)
    last = total[:, :, -1:]
    reading = system.reading.repeat_interleave(group_size, dim=1) * total.exp()
    writing = system.writing.repeat_interleave(group_size, dim=1) * (last - total).exp()
    start, end = system.place[:, :, :1], system.place[:, :, -1:] + 1
    bucket = torch.arange(buckets, device=memory.device)
    # A bucket's tokens differ from the first of the chunk in the bucket's own digit; later tokens, in higher ones too.
    own = 1 << bucket
    scale = system.scales(system.levels((system.place ^ start) | own))
    read = torch.matmul(reading, memory.transpose(2, 3).flatten(3))
    out = torch.matmul(weights(system), system.value) + (
        torch.unflatten(read, -1, (buckets, -1)) * scale[..., None]
    ).sum(3)
    moved = (system.levels((end ^ start) | own) == bucket[:, None] + 1).to(memory.dtype)
    kept = torch.matmul(moved, memory.flatten(3)) * last.exp()
    joins = (system.levels(end ^ system.place) == bucket + 1).to(memory.dtype)
    written = (writing[..., None, :] * joins[..., None]).flatten(3)
    after = kept + torch.unflatten(torch.matmul(written.transpose(-1, -2), system.value), 2, (buckets, -1)).flatten(3)
    return out, torch.unflatten(after, -1, memory.shape[3:])
