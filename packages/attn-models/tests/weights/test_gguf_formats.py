"""Each format of a GGUF tensor comes back as ggml's loops compute it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from attn_core.errors import CheckpointInvalid
from attn_models.weights import read_gguf_header
from attn_models.weights.gguf_child import READERS, dequantised
from attn_models.weights.gguf_reader import GgufHeader
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

F32 = np.float32


def half(raw: np.ndarray) -> np.float32:
    return F32(raw.view(np.float16)[0])


def f32(raw: np.ndarray) -> list[np.float32]:
    return [raw.view(np.float32)[0]]


def f16(raw: np.ndarray) -> list[np.float32]:
    return [half(raw)]


def bf16(raw: np.ndarray) -> list[np.float32]:
    return [np.array([0, 0, *raw], np.uint8).view(np.float32)[0]]


def q8_0(raw: np.ndarray) -> list[np.float32]:
    return [half(raw[0:2]) * F32(quant) for quant in raw[2:34].view(np.int8)]


def q4_0(raw: np.ndarray) -> list[np.float32]:
    return [half(raw[0:2]) * F32((int(byte) >> shift & 15) - 8) for shift in (0, 4) for byte in raw[2:18]]


def q4_1(raw: np.ndarray) -> list[np.float32]:
    d, least = half(raw[0:2]), half(raw[2:4])
    return [d * F32(int(byte) >> shift & 15) + least for shift in (0, 4) for byte in raw[4:20]]


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


def fifth_bits(raw: np.ndarray) -> list[int]:
    """The fifth bit of each of 32 weights, from a little-endian word."""
    word = int.from_bytes(raw.tobytes(), "little")
    return [word >> place & 1 for place in range(32)]


def q5_0(raw: np.ndarray) -> list[np.float32]:
    low = [int(byte) >> shift & 15 for shift in (0, 4) for byte in raw[6:22]]
    both = zip(low, fifth_bits(raw[2:6]), strict=True)
    return [half(raw[0:2]) * F32((value | fifth << 4) - 16) for value, fifth in both]


def q5_1(raw: np.ndarray) -> list[np.float32]:
    low = [int(byte) >> shift & 15 for shift in (0, 4) for byte in raw[8:24]]
    d, least = half(raw[0:2]), half(raw[2:4])
    return [d * F32(value | fifth << 4) + least for value, fifth in zip(low, fifth_bits(raw[4:8]), strict=True)]


def q2_k(raw: np.ndarray) -> list[np.float32]:
    scales, quants, d, least = raw[0:16], raw[16:80], half(raw[80:82]), half(raw[82:84])
    out, turn = [], 0
    for part in (0, 1):
        for shift in (0, 2, 4, 6):
            for side in (0, 1):
                scale = int(scales[turn])
                step, low = d * F32(scale & 15), least * F32(scale >> 4)
                run = quants[32 * part + 16 * side : 32 * part + 16 * side + 16]
                out += [step * F32(int(byte) >> shift & 3) - low for byte in run]
                turn += 1
    return out


def q3_k(raw: np.ndarray) -> list[np.float32]:
    high, quants, packed, d = raw[0:32], raw[32:96], [int(byte) for byte in raw[96:108]], half(raw[108:110])
    scales = [
        (packed[j % 8] >> 4 * (j // 8) & 15 | (packed[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32 for j in range(16)
    ]
    out, turn = [], 0
    for part in (0, 1):
        for quarter in range(4):
            for side in (0, 1):
                step = d * F32(scales[turn])
                for place in range(16 * side, 16 * side + 16):
                    third = int(high[place]) >> (4 * part + quarter) & 1
                    low = int(quants[32 * part + place]) >> 2 * quarter & 3
                    out.append(step * F32(low - (0 if third else 4)))
                turn += 1
    return out


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""kvalues_iq4nl of ggml."""


def iq4_nl(raw: np.ndarray) -> list[np.float32]:
    return [half(raw[0:2]) * F32(LEVELS[int(byte) >> shift & 15]) for shift in (0, 4) for byte in raw[2:18]]


def iq4_xs(raw: np.ndarray) -> list[np.float32]:
    d, high, low, quants = half(raw[0:2]), int.from_bytes(raw[2:4].tobytes(), "little"), raw[4:8], raw[8:136]
    out = []
    for block in range(8):
        scale = int(low[block // 2]) >> 4 * (block % 2) & 15 | (high >> 2 * block & 3) << 4
        step = d * F32(scale - 32)
        run = quants[16 * block : 16 * block + 16]
        out += [step * F32(LEVELS[int(byte) >> shift & 15]) for shift in (0, 4) for byte in run]
    return out


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The positive numbers of E2M1 (OCP Microscaling Formats 1.0, table 5)."""


def mxfp4(raw: np.ndarray) -> list[np.float32]:
    scale = 2.0 ** (int(raw[0]) - 127)
    values = [int(byte) >> shift & 15 for shift in (0, 4) for byte in raw[1:17]]
    with np.errstate(over="ignore"):
        return [F32(scale * (-FP4[value & 7] if value & 8 else FP4[value])) for value in values]


def nvfp4(raw: np.ndarray) -> list[np.float32]:
    out = []
    for part in range(4):
        bits = int(raw[part]) & 127
        # E4M3 (OCP 8-bit floating point 1.0): the largest bits are no number, which ggml reads as 0.
        scale = torch.tensor([0 if bits == 127 else bits], dtype=torch.uint8).view(torch.float8_e4m3fn).item()
        values = [int(byte) >> shift & 15 for shift in (0, 4) for byte in raw[4 + 8 * part : 12 + 8 * part]]
        out += [F32(scale * (-FP4[value & 7] if value & 8 else FP4[value])) for value in values]
    return out


def q1_0(raw: np.ndarray) -> list[np.float32]:
    d = half(raw[0:2])
    return [d if int(raw[2 + place // 8]) >> place % 8 & 1 else -d for place in range(128)]


def exponent(values: np.ndarray) -> np.ndarray:
    """Powers of two near one as E8M0; what is not finite as the largest, with which most weights overflow."""
    return np.where(np.isfinite(values), 127 + 4 * np.nan_to_num(values, posinf=0, neginf=0), 255).astype(np.uint8)


@dataclass(frozen=True)
class Format:
    """Weights and bytes of a block, the numbers in it that are no whole ones, and the loop over its weights."""

    weights: int
    size: int
    floats: tuple[int, ...]
    loop: Callable[[np.ndarray], list[np.float32]]
    number: Callable[[np.ndarray], np.ndarray] = lambda values: values.astype(np.float16).view(np.uint8)


FORMATS = {
    "F32": Format(1, 4, (0,), f32, lambda values: values.astype(F32).view(np.uint8)),
    "F16": Format(1, 2, (0,), f16),
    "BF16": Format(1, 2, (0,), bf16, lambda values: np.ascontiguousarray(values.astype(F32).view(np.uint8)[..., 2:])),
    "Q8_0": Format(32, 34, (0,), q8_0),
    "Q4_0": Format(32, 18, (0,), q4_0),
    "Q4_1": Format(32, 20, (0, 2), q4_1),
    "Q5_0": Format(32, 22, (0,), q5_0),
    "Q5_1": Format(32, 24, (0, 2), q5_1),
    "Q2_K": Format(256, 84, (80, 82), q2_k),
    "Q3_K": Format(256, 110, (108,), q3_k),
    "IQ4_NL": Format(32, 18, (0,), iq4_nl),
    "IQ4_XS": Format(256, 136, (0,), iq4_xs),
    "MXFP4": Format(32, 17, (0,), mxfp4, exponent),
    "NVFP4": Format(64, 36, (), nvfp4),
    "Q1_0": Format(128, 18, (0,), q1_0),
    "Q4_K": Format(256, 144, (0, 2), q4_k),
    "Q5_K": Format(256, 176, (0, 2), q5_k),
    "Q6_K": Format(256, 210, (208,), q6_k),
}
ROWS, BLOCKS = 3, 2


def random_blocks(kind: Format, seed: int = 0) -> np.ndarray:
    """Blocks [rows, blocks, bytes] of any bits but where the format has a floating-point number."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (ROWS, BLOCKS, kind.size), dtype=np.uint8)
    for place in kind.floats:
        number = kind.number(random.standard_normal((ROWS, BLOCKS, 1)))
        blocks[..., place : place + number.shape[-1]] = number
    return blocks


def written(path: Path, name: str, blocks: np.ndarray) -> GgufHeader:
    """The header of a file of one tensor `w` of these blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", blocks.reshape(ROWS, -1), raw_dtype=GGMLQuantizationType[name])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return read_gguf_header(path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_of_random_blocks_comes_back_as_the_format_says(name: str, tmp_path: Path) -> None:
    kind = FORMATS[name]
    blocks = random_blocks(kind)
    header = written(tmp_path / "one.gguf", name, blocks)
    assert (header.tensors["w"].type, header.tensors["w"].shape) == (name, (ROWS, BLOCKS * kind.weights))
    found = dequantised(header, header.tensors["w"])
    expected = np.array([[value for block in row for value in kind.loop(block)] for row in blocks], F32)
    assert np.array_equal(found, expected)
    if name not in READERS:
        assert np.array_equal(found, dequantize(blocks.reshape(ROWS, -1), GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if kind.floats])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in multiply")
def test_a_number_that_is_not_finite_is_refused_in_every_format(name: str, number: float, tmp_path: Path) -> None:
    kind = FORMATS[name]
    blocks = random_blocks(kind)
    bits = kind.number(np.full((1,), number))
    blocks[1, 1, kind.floats[0] : kind.floats[0] + bits.size] = bits
    header = written(tmp_path / "bad.gguf", name, blocks)
    with pytest.raises(CheckpointInvalid, match="'w' holds NaN or infinity"):
        dequantised(header, header.tensors["w"])


def test_weights_are_multiplied_by_the_scales_beside_them(tmp_path: Path) -> None:
    """As llama.cpp converts NVFP4 checkpoints; experts have a scale each."""
    blocks = random_blocks(FORMATS["NVFP4"])
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    writer.add_tensor("w.weight", blocks.reshape(ROWS, -1), raw_dtype=GGMLQuantizationType.NVFP4)
    writer.add_tensor("w.scale", np.array([0.3], F32))
    writer.add_tensor("e.weight", blocks.reshape(ROWS, 1, -1), raw_dtype=GGMLQuantizationType.NVFP4)
    writer.add_tensor("e.scale", np.array([0.3, 0.5, 0.7], F32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    header = read_gguf_header(tmp_path / "scaled.gguf")
    plain = np.array([[value for block in row for value in nvfp4(block)] for row in blocks], F32)
    assert np.array_equal(dequantised(header, header.tensors["w.weight"]), plain * F32(0.3))
    each = plain[:, None] * np.array([0.3, 0.5, 0.7], F32)[:, None, None]
    assert np.array_equal(dequantised(header, header.tensors["e.weight"]), each)
    assert np.array_equal(dequantised(header, header.tensors["e.weight"], 2), each[2])


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    header = written(tmp_path / "whole.gguf", "I32", np.ones((ROWS, BLOCKS, 4), np.uint8))
    with pytest.raises(CheckpointInvalid, match="'w': type I32 is not a type of weights"):
        dequantised(header, header.tensors["w"])
