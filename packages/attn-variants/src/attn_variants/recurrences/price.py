"""What the matrix products of a linear recurrence cost. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple

from attn_core import Heads
from attn_core.kernels.recurrence import Decay


class Update(NamedTuple):
    """How a memory is updated: what fades on its own, and whether what a key held is corrected (the delta rule)."""

    decay: Decay = "none"
    corrects: bool = False


def chunked_flops(heads: Heads, update: Update, tokens: int, chunk: int) -> int:
    """FLOPs of `chunked` over one sequence of `tokens` from an empty memory, two per multiply-add.

    As torch counts them: matrix products only, not the triangular systems of the delta rule (chunk² · (key_size +
    value_size) a chunk).
    """
    key, value = heads.key_size, heads.value_size
    chunks = -(-tokens // chunk)
    pairs = _pair_flops(update, key, chunk)
    out = 2 * chunk * chunk * value + 2 * chunk * key * value
    if not update.corrects:
        return heads.query * chunks * (pairs + out + 2 * chunk * key * value)
    each = 2 * pairs + out + 2 * chunk * key * (value + key) + 2 * chunk * key * value
    between = (chunks - 1) * 2 * key * key * value
    return heads.query * (chunks * each + between) if tokens else 0


def least_flops(heads: Heads, update: Update, tokens: int) -> int:
    """FLOPs of one token after the other: one product to write, one to read, and by the delta rule one to look up."""
    products = 3 if update.corrects else 2
    return tokens * products * 2 * heads.query * heads.key_size * heads.value_size


def _pair_flops(update: Update, key: int, chunk: int) -> int:
    if update.decay != "channel":
        return 2 * chunk * chunk * key
    # Every pair of different tokens of a block is met once, in one of the rounds of halving.
    block = 1 << (chunk - 1).bit_length()
    return block * (block - 1) * key
