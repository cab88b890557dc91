"""Blocks of 256 weights with scales of their own come back as ggml's loops compute them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from attn_models.weights import read_gguf_header
from attn_models.weights.gguf_tensor import dequantised
from gguf import GGMLQuantizationType

BLOCK = 256
F32 = np.float32


def half(raw: np.ndarray) -> np.float32:
    return F32(raw.view(np.float16)[0])


def scale_and_least(packed: np.ndarray, j: int) -> tuple[int, int]:
    """The j-th six-bit scale and minimum of the twelve bytes that hold eight of each (get_scale_min_k4 of ggml)."""
    q = [int(byte) for byte in packed]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4)


def q4_k(raw: np.ndarray) -> list[np.float32]:
    d, least, packed, quants = half(raw[0:2]), half(raw[2:4]), raw[4:16], raw[16:144]
    out = []
    for group in range(4):
        for upper in (0, 1):
            scale, minimum = scale_and_least(packed, 2 * group + upper)
            run = quants[32 * group : 32 * group + 32]
            out += [d * F32(scale) * F32((int(byte) >> 4 * upper) & 15) - least * F32(minimum) for byte in run]
    return out


def q5_k(raw: np.ndarray) -> list[np.float32]:
    d, least, packed, high, quants = half(raw[0:2]), half(raw[2:4]), raw[4:16], raw[16:48], raw[48:176]
    out = []
    for group in range(4):
        for upper in (0, 1):
            scale, minimum = scale_and_least(packed, 2 * group + upper)
            for place, byte in enumerate(quants[32 * group : 32 * group + 32]):
                fifth = 16 * (int(high[place]) >> (2 * group + upper) & 1)
                out.append(d * F32(scale) * F32((int(byte) >> 4 * upper & 15) + fifth) - least * F32(minimum))
    return out


def q6_k(raw: np.ndarray) -> list[np.float32]:
    low, high, scales, d = raw[0:128], raw[128:192], raw[192:208].view(np.int8), half(raw[208:210])
    out = []
    for part in (0, 1):
        for quarter in range(4):
            for place in range(32):
                byte = int(low[64 * part + place + 32 * (quarter % 2)]) >> 4 * (quarter // 2) & 15
                value = (byte | (int(high[32 * part + place]) >> 2 * quarter & 3) << 4) - 32
                out.append(d * F32(scales[8 * part + place // 16 + 2 * quarter]) * F32(value))
    return out


KINDS: dict[GGMLQuantizationType, tuple[int, tuple[int, ...], Callable[[np.ndarray], list[np.float32]]]] = {
    GGMLQuantizationType.Q4_K: (144, (0, 2), q4_k),
    GGMLQuantizationType.Q5_K: (176, (0, 2), q5_k),
    GGMLQuantizationType.Q6_K: (210, (208,), q6_k),
}
"""Bytes of a block, where its half-precision numbers lie, and the loop over it."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_tensor_of_random_blocks_comes_back_as_the_format_says(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    size, halves, loop = KINDS[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 2, size), dtype=np.uint8)
    for place in halves:
        numbers = random.standard_normal((3, 2)).astype(np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", blocks.reshape(3, 2 * size), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    header = read_gguf_header(tmp_path / "k.gguf")
    assert header.tensors["w"].shape == (3, 2 * BLOCK)
    expected = np.array([[value for block in row for value in loop(block)] for row in blocks], F32)
    assert np.array_equal(dequantised(header, header.tensors["w"]), expected)
