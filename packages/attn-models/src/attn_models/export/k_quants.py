"""Quantises weights to GGUF's Q4_K: blocks of 256 weights in 8 sub-blocks, each with a scale and a minimum of 6 bits.

Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, block_q4_K. A weight is d s q - m' n of its
sub-block's integers s (scale) and n (minimum), its own integer q from 0 to 15, and the block's float16 d and m'.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK, SUB = 256, 32
LEVELS = 15
"""The largest integer of a weight."""
SIX_BITS = 63
STEPS = np.arange(-1.0, 1.05, 0.1, dtype=np.float32)
"""Changes to the number of levels within the range of a sub-block, of which the one with the smallest error is used."""


def quantize_q4_k(weights: Floats) -> Bytes:
    """Bytes [..., rows, bytes of a row] of float32 weights [..., rows, inputs]; `inputs` is a multiple of 256.

    The scale and minimum of each sub-block minimise the squared error, weighted towards large weights: rounded to
    integers for several ranges, then fitted by least squares.
    """
    blocks = weights.reshape(-1, BLOCK // SUB, SUB).astype(np.float32)
    scales, minima = _fitted(blocks)
    most = np.stack([scales.max(-1), minima.max(-1)]) / SIX_BITS
    halves = most.astype(np.float16)
    unit = halves.astype(np.float32)
    inverse = np.divide(1.0, unit, out=np.zeros_like(unit), where=unit > 0)
    integers = np.clip(np.rint(np.stack([scales, minima]) * inverse[..., None]), 0, SIX_BITS)
    scale, least = (integers * unit[..., None])[..., None]
    whole = np.divide(blocks + least, scale, out=np.zeros_like(blocks), where=scale > 0)
    quants = np.clip(np.rint(whole), 0, LEVELS).astype(np.uint8)
    pairs = quants.reshape(-1, BLOCK // SUB // 2, 2, SUB)
    packed = [
        halves.T.copy().view(np.uint8).reshape(-1, 4),
        _packed_scales(*integers.astype(np.uint8)),
        (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, BLOCK // 2),
    ]
    return np.concatenate(packed, axis=1).reshape(*weights.shape[:-1], -1)


def _fitted(blocks: Floats) -> tuple[Floats, Floats]:
    """The scale and the negated minimum of each sub-block [blocks, sub-blocks], both at least 0."""
    low = np.minimum(blocks.min(-1, keepdims=True), 0)
    extent = np.maximum(blocks.max(-1, keepdims=True) - low, 1e-30)
    importance = np.sqrt((blocks**2).mean(-1, keepdims=True)) + np.abs(blocks)
    total, mean = importance.sum(-1), (importance * blocks).sum(-1)
    best = extent[..., 0] / LEVELS, low[..., 0]
    least = _error(blocks, importance, *best)
    for step in STEPS:
        q = np.clip(np.rint((LEVELS + step) / extent * (blocks - low)), 0, LEVELS)
        first, second, product = ((importance * each).sum(-1) for each in (q, q * q, q * blocks))
        determinant = total * second - first * first
        fits = determinant > 0
        safe = np.where(fits, determinant, 1)
        scale, offset = (total * product - mean * first) / safe, (second * mean - first * product) / safe
        # A minimum above 0 cannot be stored: then the scale alone is fitted.
        scale = np.where(offset > 0, product / np.maximum(second, 1e-30), scale)
        offset = np.minimum(offset, 0)
        error = _error(blocks, importance, scale, offset)
        better = fits & (scale > 0) & (error < least)
        best = np.where(better, scale, best[0]), np.where(better, offset, best[1])
        least = np.where(better, error, least)
    return best[0], -best[1]


def _error(blocks: Floats, importance: Floats, scale: Floats, offset: Floats) -> Floats:
    """The weighted squared error of each sub-block, for integers rounded with this scale and offset."""
    unit = np.where(scale > 0, scale, 1)[..., None]
    q = np.clip(np.rint((blocks - offset[..., None]) / unit), 0, LEVELS)
    error: Floats = (importance * (scale[..., None] * q + offset[..., None] - blocks) ** 2).sum(-1)
    return error


def _packed_scales(scales: Bytes, minima: Bytes) -> Bytes:
    """12 bytes for each block's 8 scales and 8 minima [blocks, 8] of 6 bits: the first four of each in the low bits of
    a byte, the low four bits of the others together in a byte, and their high two bits above the first ones."""
    first = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (scales, minima)]
    rest = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate([*first, rest], axis=1)
