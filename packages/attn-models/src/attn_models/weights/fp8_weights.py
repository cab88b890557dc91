"""Weights stored in FP8 (e4m3, arXiv 2209.05433): the formats of folders, and the byte layout that kernels multiply.

A folder stores codes and scales in separate tensors. For kernels (GPU only), each output is a row of bytes with a
float32 scale before the codes that share it, so that rows can be split and joined like those of any matrix, whatever
block of outputs a scale applies to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, partial
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from attn_models.weights.block_layouts import BlockLayout, Bytes, Floats
from attn_models.weights.safetensors_files import TensorEntry, is_finite
from attn_models.weights.stored_format import Allowed, StoredFormat, refused, require_known

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

GROUP = 128
"""The number of inputs that share a scale in the format `fp8_block`."""
SCALE_BYTES = 4
"""The size of a scale, a float32."""
LARGEST = 448.0
"""The largest value of e4m3."""


@cache
def e4m3_numbers() -> Floats:
    """The value of each of the 256 codes (arXiv 2209.05433, table 1), float32 [256]."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, (codes & 7) / 8
    sizes = np.where(exponents == 0, fractions * 2.0**-6, (1 + fractions) * 2.0 ** (exponents - 7.0))
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -sizes, sizes).astype(np.float32)


@cache
def fp8_layout(inputs: int | None) -> BlockLayout:
    """The layout of rows whose `inputs` share one scale (`fp8_channel`), or with None each 128 (`fp8_block`)."""
    size = GROUP if inputs is None else inputs
    return BlockLayout(
        weights="fp8_block" if inputs is None else "fp8_channel",
        nbytes=SCALE_BYTES + size,
        inputs=size,
        halves=(),
        read=partial(_numbers_of_rows, size=size),
    )


def _numbers_of_rows(rows: Bytes, size: int) -> Floats:
    apart = rows.reshape(len(rows), -1, SCALE_BYTES + size)
    scales = np.ascontiguousarray(apart[..., :SCALE_BYTES]).view(np.float32)
    numbers: Floats = (e4m3_numbers()[apart[..., SCALE_BYTES:]] * scales).reshape(len(rows), -1)
    return numbers


def dequantising_reason(shape: tuple[int, ...], block: tuple[int, int] | None) -> str | None:
    """Why no kernel multiplies weights of this shape, with scales per `block`, as stored; None where one does."""
    if len(shape) != 2:
        return f"it has {len(shape)} axes; only matrices can be kept in FP8"
    if block is not None and (block[1] != GROUP or shape[1] % GROUP):
        given = f"its blocks are {block[0]} x {block[1]} and it has {shape[1]} inputs"
        return f"{given}; only rows of whole blocks of {GROUP} inputs can be kept in FP8"
    return None


def fp8_rows(codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Join codes [outputs, inputs], float8_e4m3fn, and scales to rows of bytes, uint8 [outputs, bytes of a row].

    `scales` has one element, one for each output, or [blocks of outputs, blocks of 128 inputs], with blocks of size
    `block`.
    """
    import torch

    outputs = len(codes)
    if block is None:
        shared = scales.float().reshape(-1, 1).expand(outputs, 1)
    else:
        shared = scales.float().repeat_interleave(block[0], 0)[:outputs]
    heads = shared.contiguous().view(torch.uint8).view(outputs, -1, SCALE_BYTES)
    apart = codes.contiguous().view(torch.uint8).view(outputs, heads.shape[1], -1)
    return torch.cat([heads, apart], dim=-1).flatten(1)


SCALES = ("weight_scale_inv", "weight_scale")
ACTIVATIONS = ("input_scale", "activation_scale")
FLOAT8 = "F8_E4M3"


class Fp8(StoredFormat):
    """8-bit floats (E4M3, arXiv 2209.05433) times a scale: one per tensor, per output row, or per block of outputs and
    inputs, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).

    Settings for activations are not used: activations keep the compute dtype, or are quantised to FP8 dynamically with
    `--quantization fp8`.
    """

    devices = ("cuda",)

    allowed: ClassVar[Allowed] = {
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "activation_scheme": ("dynamic", "static", None),
        "weight_block_size": None,
        "scale_fmt": (None, "float", "ue8m0"),
        "expert_dtype": (None, "fp8"),
    }

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._reasons_logged: set[str] = set()
        self.block = self.block_of(config.get("weight_block_size"))

    def block_of(self, given: Any) -> tuple[int, int] | None:
        """The size of the blocks [outputs, inputs] that share a scale; None where there are no blocks."""
        if given is None:
            return None
        if not isinstance(given, list) or len(given) != 2 or any(type(size) is not int or size < 1 for size in given):
            raise refused(self.path, "weight_block_size", given, "null, or two whole numbers from 1")
        return given[0], given[1]

    def weights(self, entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, str]]:
        """The tensors stored as E4M3, each with its scale and, where there are any, scales of activations."""
        found: dict[str, dict[str, str]] = {}
        for name, entry in entries.items():
            if entry.dtype != FLOAT8:
                continue
            layer = name.removesuffix(".weight")
            scale = next((f"{layer}.{own}" for own in SCALES if f"{layer}.{own}" in entries), None)
            if scale is None or layer == name:
                raise self.fail(name, f"is {FLOAT8}, but has no {' or '.join(SCALES)}")
            input_scales = {own: f"{layer}.{own}" for own in ACTIVATIONS if f"{layer}.{own}" in entries}
            found[name] = {"weight": name, "scale": scale, **input_scales}
        return found

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape of the codes."""
        shape, scale = entries[parts["weight"]].shape, entries[parts["scale"]].shape
        if self.block is not None:
            fits = len(shape) == 2 and scale == (ceil(shape[0] / self.block[0]), ceil(shape[1] / self.block[1]))
        else:
            fits = prod(scale) == 1 or (len(shape) == 2 and scale in ((shape[0], 1), (shape[0],)))
        if not fits:
            needed = (
                f"a scale for each block of {list(self.block)}" if self.block else "one scale, or one for each output"
            )
            raise self.fail(name, f"has shape {list(shape)} and scales of shape {list(scale)}; needed: {needed}")
        return shape

    def kept_bytes(self, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> int | None:
        """See `StoredFormat`: the size of the result of `fp8_rows`."""
        shape = entries[parts["weight"]].shape
        if dequantising_reason(shape, self.block) is not None:
            return None
        return shape[0] * (shape[1] + SCALE_BYTES * (shape[1] // GROUP if self.block else 1))

    def in_blocks(self, name: str, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The weight as stored, if a kernel multiplies it so; otherwise None, with one warning for each reason."""
        from attn_models.quantization.block_tensor import BlockTensor

        weight, scales = parts["weight"], parts["scale"]
        why = dequantising_reason(tuple(weight.shape), self.block)
        if why is not None:
            if why not in self._reasons_logged:
                log.warning("%s: %r and other such weights are dequantised: %s", self.path.parent, name, why)
            self._reasons_logged.add(why)
            return None
        # The codes were checked when they were read; only the scales are left.
        if not is_finite(LARGEST * scales.float()):
            raise self.fail(name, "holds NaN or infinity once it is dequantised")
        return BlockTensor(fp8_rows(weight, scales, self.block), fp8_layout(None if self.block else weight.shape[1]))

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The codes times their scales, in float32."""
        weight, scale = parts["weight"].float(), parts["scale"].float()
        if self.block is None:
            return weight * (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(()))
        whole = scale.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return weight * whole[: weight.shape[0], : weight.shape[1]]


class CompressedTensors(Fp8):
    """FP8 as written by compressed-tensors (llm-compressor, vLLM); its other formats are refused by name."""

    allowed: ClassVar[Allowed] = {
        "version": None,
        "format": ("float-quantized", "naive-quantized"),
        "config_groups": None,
        "kv_cache_scheme": (None,),
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
    }
    of_weights: ClassVar[Allowed] = dict.fromkeys(
        ("observer", "observer_kwargs", "dynamic", "strategy", "block_structure", "scale_dtype", "zp_dtype")
    ) | {"num_bits": (8,), "type": ("float",), "symmetric": (True,), "group_size": (None,), "actorder": (None,)}

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        StoredFormat.__init__(self, config, path)
        self._reasons_logged = set()
        groups, self.block = config.get("config_groups"), None
        if groups is None:  # as transformers' own class writes it; the scales' shapes are checked
            return
        if not isinstance(groups, Mapping) or not groups:
            raise refused(path, "config_groups", groups, "a description of the weights")
        blocks = {self._block_of_group(name, group) for name, group in groups.items()}
        if len(blocks) != 1:
            raise refused(path, "config_groups", list(groups), "groups whose weights share one strategy")
        self.block = blocks.pop()

    def _block_of_group(self, name: str, group: Any) -> tuple[int, int] | None:
        place = f"config_groups.{name}."
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise refused(self.path, f"{place}weights", weights, "an object")
        known = dict.fromkeys(("targets", "weights", "input_activations")) | {"output_activations": (None,)}
        require_known(group, known | {"format": (*self.allowed["format"], None)}, self.path, place)  # type: ignore[misc]
        require_known(weights, self.of_weights, self.path, f"{place}weights.")
        strategy = weights.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            raise refused(self.path, f"{place}weights.strategy", strategy, "'tensor', 'channel' or 'block'")
        return self.block_of(weights.get("block_structure")) if strategy == "block" else None
