"""Weights in the formats of compressed-tensors and bitsandbytes, packed by loops, and the numbers they stand for."""

from __future__ import annotations

import json

import numpy as np
import torch


def words_of(columns, bits):
    """Numbers [rows, columns] to int32 words [rows, columns * bits / 32], lowest bits first."""
    rows = []
    for row in columns.tolist():
        whole = sum(value << bits * place for place, value in enumerate(row))
        words = [whole >> 32 * place & 0xFFFFFFFF for place in range(len(row) * bits // 32)]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def e4m3(byte):
    """The number of a byte of E4M3 by its definition (arXiv 2209.05433, table 1)."""
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = torch.tensor([e4m3(byte) if byte & 127 != 127 else float("nan") for byte in range(256)])


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
            numbers = E4M3[codes.long()]
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


class Gemv:
    """AWQ for GEMV kernels: words of eight inputs of an output, or words of 16 bits of four outputs if `fast`."""

    def __init__(self, *, fast=False):
        self.fast = fast
        said = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemv_fast" if fast else "gemv"}
        self.config = {"quant_method": "awq", **said}

    def store(self, layer, weight, random):
        outputs, inputs = weight.shape
        numbers = torch.from_numpy(random.integers(0, 16, (outputs, inputs)))
        zeros, scales = torch.zeros(outputs, 32, dtype=torch.int64), torch.zeros(outputs, 32).half()
        zeros[:, : inputs // 32] = torch.from_numpy(random.integers(0, 16, (outputs, inputs // 32)))
        scales[:, : inputs // 32] = torch.from_numpy(random.integers(1, 9, (outputs, inputs // 32)) / 512)
        group = torch.arange(inputs) // 32
        expected = (scales[:, group] * (numbers - zeros[:, group])).float()
        if not self.fast:
            parts = {"qweight": words_of(numbers, 4), "qzeros": words_of(zeros, 4), "scales": scales}
            return {f"{layer}.{part}": tensor for part, tensor in parts.items()}, expected
        words = np.zeros((outputs // 4, inputs), dtype=np.uint16)
        for o in range(outputs):
            for i in range(inputs):
                place = i // 32 * 32 + i % 8 // 2 * 8 + i % 2 * 4 + i % 32 // 8
                flat = o % 4 * 64 + place % 64
                words[o // 4, place // 64 * 64 + flat // 4] |= int(numbers[o, i]) << 4 * (flat % 4)
        parts = {"qweight": torch.from_numpy(words.view(np.int16)), "scales": scales.T, "qzeros": -(scales * zeros).T}
        return {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}, expected


class TorchAo:
    """torchao's classes of weights: scales of 32 inputs, or of rows for FP8; the header names the class."""

    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Config", "_data": {}}}}

    def __init__(self, kind):
        self.kind = kind

    def store(self, layer, weight, random):
        outputs, inputs = weight.shape
        spread = torch.arange(inputs) // 32
        scales = torch.from_numpy(random.uniform(0.01, 0.02, (outputs, inputs // 32))).float()
        if self.kind == "Float8Tensor":
            bytes_ = torch.from_numpy(random.integers(0, 127, (outputs, inputs), dtype=np.uint8))
            numbers = E4M3[bytes_.long()]
            parts = {"qdata": bytes_.view(torch.float8_e4m3fn), "scale": scales[:, :1]}
            expected = numbers * scales[:, :1]
        elif self.kind == "Int4Tensor":
            numbers = torch.from_numpy(random.integers(-8, 8, (outputs, inputs)))
            zeros = torch.from_numpy(random.uniform(-0.1, 0.1, (outputs, inputs // 32))).float()
            packed = (numbers[:, ::2] & 15 | (numbers[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
            parts = {"qdata": packed, "scale": scales.T, "zero_point": zeros.T}
            expected = scales[:, spread] * numbers + zeros[:, spread]
        else:
            numbers = torch.from_numpy(random.integers(-128, 128, (outputs, inputs), dtype=np.int8))
            zeros = torch.from_numpy(random.integers(-9, 9, scales.shape, dtype=np.int8))
            parts = {"qdata": numbers, "scale": scales, "zero_point": zeros}
            expected = (numbers.float() - zeros[:, spread].float()) * scales[:, spread]
        return {f"{layer}._weight_{part}": tensor.contiguous() for part, tensor in parts.items()}, expected
