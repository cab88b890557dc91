"""Weights in the formats of compressed-tensors and bitsandbytes, packed by loops, and the numbers they stand for."""

from __future__ import annotations

import json

import numpy as np
import torch


def words_of(columns, bits):
    """Numbers [rows, columns] to int32 words [rows, columns * bits / 32], lowest bits first."""
    per, rows = 32 // bits, []
    for row in columns.tolist():
        words = [
            sum(value << bits * place for place, value in enumerate(row[i : i + per])) for i in range(0, len(row), per)
        ]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def e4m3(byte):
    """The number of a byte of E4M3 by its definition (arXiv 2209.05433, table 1)."""
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def compressed(strategy, **weights):
    said = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **weights}
    group = {"targets": ["Linear"], "weights": said, "input_activations": {"dynamic": True}, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


LEVELS = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of FP4 by their bits (OCP Microscaling Formats 1.0, table 5)."""


class Integers:
    """Integers of compressed-tensors with a scale for each group of inputs, and zero points if they are `apart`."""

    def __init__(self, bits=4, size=32, *, apart=False, shuffled=False, form="pack-quantized"):
        self.bits, self.size, self.apart, self.shuffled, self.form = bits, size, apart, shuffled, form
        said = {"num_bits": bits, "type": "int", "symmetric": not apart, "strategy": "group", "group_size": size}
        self.config = compressed("group")
        self.config |= {"format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": said}}}

    def store(self, layer, weight, random):
        outputs, inputs = weight.shape
        half, groups = 1 << (self.bits - 1), inputs // self.size
        numbers = torch.from_numpy(random.integers(-half, half, (outputs, inputs)))
        zeros = torch.from_numpy(random.integers(-half, half, (outputs, groups))) * self.apart
        scales = torch.from_numpy(random.uniform(0.01, 0.02, (outputs, groups))).half()
        group = torch.arange(inputs) // self.size
        if self.shuffled:
            group = group[torch.from_numpy(random.permutation(inputs))]
        if self.form == "int-quantized":
            stored = {f"{layer}.weight": numbers.to(torch.int8)}
        else:
            packed, sizes = words_of(numbers + half, self.bits), torch.tensor([outputs, inputs])
            stored = {f"{layer}.weight_packed": packed, f"{layer}.weight_shape": sizes}
        stored |= {f"{layer}.weight_scale": scales, f"{layer}.input_scale": torch.tensor(0.5)}
        if self.apart:
            stored[f"{layer}.weight_zero_point"] = words_of((zeros + half).T, self.bits).T.contiguous()
        if self.shuffled:
            stored[f"{layer}.weight_g_idx"] = group.int()
        return stored, scales[:, group].float() * (numbers - zeros[:, group]).float()


class Floats:
    """NVFP4 (a scale of E4M3 for 16 inputs over a global one), MXFP4 and MXFP8 (a power of two for 32 inputs)."""

    def __init__(self, form, size=32, bits=4):
        self.form, self.size, self.bits = form, size, bits
        said = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": "group", "group_size": size}
        self.config = compressed("group")
        self.config |= {"format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": said}}}

    def store(self, layer, weight, random):
        outputs, inputs = weight.shape
        codes = torch.from_numpy(random.integers(0, 1 << self.bits, (outputs, inputs), dtype=np.uint8))
        codes[(codes & 127) == 127] = 0
        if self.form == "nvfp4-pack-quantized":
            scales = torch.from_numpy(random.uniform(1, 400, (outputs, inputs // 16))).to(torch.float8_e4m3fn)
            stored, factors = {f"{layer}.weight_global_scale": torch.tensor([3e4])}, scales.float() / 3e4
        else:
            scales = torch.from_numpy(random.integers(110, 125, (outputs, inputs // 32), dtype=np.uint8))
            stored, factors = {}, 2.0 ** (scales.float() - 127)
        stored[f"{layer}.weight_scale"] = scales
        if self.bits == 4:
            stored[f"{layer}.weight_packed"], numbers = codes[:, ::2] | codes[:, 1::2] << 4, LEVELS[codes.long()]
        else:
            stored[f"{layer}.weight"] = codes.view(torch.float8_e4m3fn)
            numbers = torch.tensor([[e4m3(int(code)) for code in row] for row in codes])
        return stored, numbers * factors.repeat_interleave(self.size, 1)


class BitsAndBytes:
    """Four bits of bitsandbytes: a number of a table times the scale of its block, which may be coded as well."""

    def __init__(self, *, nested=False):
        self.nested = nested
        self.config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}
        self.config |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested, "llm_int8_threshold": 6.0}

    def store(self, layer, weight, random):
        count, name, table = weight.numel(), f"{layer}.weight", torch.from_numpy(random.uniform(-1, 1, 16)).float()
        codes = torch.from_numpy(random.integers(0, 16, count, dtype=np.uint8))
        scales = torch.from_numpy(random.uniform(0.01, 0.02, count // 64)).float()
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        stored = {name: (codes[::2] << 4 | codes[1::2])[:, None], f"{name}.quant_map": table}
        if self.nested:
            bytes_, outer = torch.from_numpy(random.integers(0, 256, count // 64, dtype=np.uint8)), torch.rand(2)
            inner = torch.from_numpy(random.uniform(-1, 1, 256)).float()
            stored |= {f"{name}.nested_absmax": outer[: -(-len(bytes_) // 64)], f"{name}.nested_quant_map": inner}
            scales = inner[bytes_.long()] * outer[torch.arange(len(bytes_)) // 64] + 0.25
            state |= {"nested_blocksize": 64, "nested_dtype": "float32", "nested_offset": 0.25}
        stored[f"{name}.absmax"] = bytes_ if self.nested else scales
        described = json.dumps(state).encode()
        stored[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(described), dtype=torch.uint8)
        return stored, (table[codes.long()] * scales.repeat_interleave(64)).view(weight.shape)


class Int8:
    """Eight bits of bitsandbytes: the largest number of an output is 127."""

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "_load_in_8bit": True, "llm_int8_threshold": 6.0}

    def store(self, layer, weight, random):
        numbers = torch.from_numpy(random.integers(-127, 128, tuple(weight.shape), dtype=np.int8))
        largest = torch.from_numpy(random.uniform(0.5, 2, len(weight))).float()
        stored = {f"{layer}.weight": numbers, f"{layer}.SCB": largest}
        stored[f"{layer}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return stored, numbers.float() * (largest / 127)[:, None]
