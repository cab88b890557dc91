"""Quantises weights to GGUF's Q4_K, Q5_K and Q6_K: blocks of 256 weights whose sub-blocks have scales of their own.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A weight of Q4_K and Q5_K is d s q - m' n of
its sub-block's integers s (scale) and n (minimum), both of 6 bits, its own integer q >= 0, and the block's float16 d
and m'. A weight of Q6_K is d s q, with s of 8 bits and q from -32 to 31.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK, SUB, SUB_OF_Q6 = 256, 32, 16
SIX_BITS = 63
HALF = 32
"""The absolute value of the smallest integer of a Q6_K weight."""
STEPS = np.arange(-1.0, 1.05, 0.1, dtype=np.float32)
"""Changes to the number of levels within the range of a sub-block, of which the one with the smallest error is used."""
K_QUANTS = {"q4_k": 4, "q5_k": 5, "q6_k": 6}
"""The bits of a weight's integer."""


def quantize_k(weights: Floats, bits: int, importance: Floats | None = None) -> Bytes:
    """Bytes [..., rows, bytes of a row] of float32 weights [..., rows, inputs], of 4, 5 or 6 `bits`; `inputs` is a
    multiple of 256.

    The scale (and minimum) of each sub-block minimise the squared error: rounded to integers for several ranges, then
    fitted by least squares. Errors count by `importance` [inputs], the mean squares of the inputs (an importance
    matrix); without it, by the size of the weights.
    """
    rows = weights.astype(np.float32).reshape(-1, BLOCK)
    counts = None if importance is None else np.broadcast_to(importance, weights.shape).reshape(-1, BLOCK)
    if counts is not None and not counts.any():
        counts = None
    parts = _symmetric(rows, counts) if bits == K_QUANTS["q6_k"] else _with_minima(rows, counts, bits)
    return np.concatenate(parts, axis=1).reshape(*weights.shape[:-1], -1)


def _with_minima(rows: Floats, counts: Floats | None, bits: int) -> list[Bytes]:
    """The parts of Q4_K or Q5_K blocks."""
    blocks, levels = rows.reshape(-1, BLOCK // SUB, SUB), 2**bits - 1
    if counts is None:
        importance = np.sqrt((blocks**2).mean(-1, keepdims=True)) + np.abs(blocks)
    else:
        spread = 2 * (rows**2).mean(-1)[:, None, None]
        importance = counts.reshape(blocks.shape) * np.sqrt(spread + blocks**2)
    scales, minima = _fitted(blocks, importance, levels)
    most = np.stack([scales.max(-1), minima.max(-1)]) / SIX_BITS
    halves = most.astype(np.float16)
    unit = halves.astype(np.float32)
    integers = np.clip(np.rint(_over(np.stack([scales, minima]), unit[..., None])), 0, SIX_BITS)
    scale, least = (integers * unit[..., None])[..., None]
    quants = np.clip(np.rint(_over(blocks + least, scale)), 0, levels).astype(np.uint8)
    pairs = (quants & 15).reshape(-1, BLOCK // SUB // 2, 2, SUB)
    fifth = np.packbits(quants >> 4, axis=1, bitorder="little")[:, 0]
    return [
        halves.T.copy().view(np.uint8).reshape(-1, 4),
        _packed_scales(*integers.astype(np.uint8)),
        *([fifth] if levels > 15 else []),
        (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, BLOCK // 2).astype(np.uint8),
    ]


def _fitted(blocks: Floats, importance: Floats, levels: int) -> tuple[Floats, Floats]:
    """The scale and the negated minimum of each sub-block [blocks, sub-blocks], both at least 0."""
    low = np.minimum(blocks.min(-1, keepdims=True), 0)
    extent = np.maximum(blocks.max(-1, keepdims=True) - low, 1e-30)
    total, mean = importance.sum(-1), (importance * blocks).sum(-1)

    def error(scale: Floats, offset: Floats) -> Floats:
        q = np.clip(np.rint((blocks - offset[..., None]) / np.where(scale > 0, scale, 1)[..., None]), 0, levels)
        found: Floats = (importance * (scale[..., None] * q + offset[..., None] - blocks) ** 2).sum(-1)
        return found

    best = extent[..., 0] / levels, low[..., 0]
    least = error(*best)
    for step in STEPS:
        q = np.clip(np.rint((levels + step) / extent * (blocks - low)), 0, levels)
        first, second, product = ((importance * each).sum(-1) for each in (q, q * q, q * blocks))
        determinant = total * second - first * first
        fits = determinant > 0
        safe = np.where(fits, determinant, 1)
        scale, offset = (total * product - mean * first) / safe, (second * mean - first * product) / safe
        # A minimum above 0 cannot be stored: then the scale alone is fitted.
        scale = np.where(offset > 0, product / np.maximum(second, 1e-30), scale)
        offset = np.minimum(offset, 0)
        found = error(scale, offset)
        better = fits & (scale > 0) & (found < least)
        best = np.where(better, scale, best[0]), np.where(better, offset, best[1])
        least = np.where(better, found, least)
    return best[0], -best[1]


def _packed_scales(scales: Bytes, minima: Bytes) -> Bytes:
    """12 bytes for each block's 8 scales and 8 minima [blocks, 8] of 6 bits: the first four of each in the low bits of
    a byte, the low four bits of the others together in a byte, and their high two bits above the first ones."""
    first = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (scales, minima)]
    rest = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate([*first, rest], axis=1)


def _symmetric(rows: Floats, counts: Floats | None) -> list[Bytes]:
    """The parts of Q6_K blocks."""
    blocks = rows.reshape(-1, BLOCK // SUB_OF_Q6, SUB_OF_Q6)
    importance = blocks**2 if counts is None else counts.reshape(blocks.shape)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    best, gained = np.zeros(blocks.shape[:2], np.float32), np.zeros(blocks.shape[:2], np.float32)
    for step in STEPS * 9:
        q = np.clip(np.rint(_over(blocks * -(HALF + step / 10), largest)), -HALF, HALF - 1)
        product, square = ((importance * each).sum(-1) for each in (q * blocks, q * q))
        scale = _over(product, square)
        better = scale * product > gained
        best, gained = np.where(better, scale, best), np.where(better, scale * product, gained)
    extreme = np.take_along_axis(best, np.abs(best).argmax(-1)[:, None], -1)
    halves = (extreme / -128).astype(np.float16)
    unit = halves.astype(np.float32)
    integers = np.clip(np.rint(_over(best, unit)), -128, 127)
    quants = np.clip(np.rint(_over(blocks, (integers * unit)[..., None])), -HALF, HALF - 1) + HALF
    # Two halves of 128 weights, each four quarters of 32: the low bits of quarters 0 and 2, 1 and 3 share bytes.
    quarters = quants.astype(np.uint8).reshape(-1, 2, 4, SUB)
    low = (quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4).reshape(-1, BLOCK // 2).astype(np.uint8)
    pairs = (quarters >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high: Bytes = np.bitwise_or.reduce(pairs, axis=2).reshape(-1, BLOCK // 4)
    return [low, high, integers.astype(np.int8).view(np.uint8), halves.view(np.uint8)]


def _over(numbers: Floats, divisor: Floats) -> Floats:
    """The quotient, 0 where the divisor is 0."""
    shape = np.broadcast_shapes(numbers.shape, divisor.shape)
    return np.divide(numbers, divisor, out=np.zeros(shape, np.float32), where=divisor != 0)
