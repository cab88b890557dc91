"""Numbers of few bits with shared scales: MXFP4 as in gpt-oss, and what compressed-tensors writes besides FP8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_models.weights.fp8_weights import FLOAT8, CompressedTensors
from attn_models.weights.grouped_weights import Grouped, unpacked
from attn_models.weights.safetensors_files import TensorEntry
from attn_models.weights.stored_format import Allowed, StoredFormat, refused, require_known

if TYPE_CHECKING:
    from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1 by their four bits (OCP Microscaling Formats 1.0, table 5)."""
SCALE_BIAS = 127


class Mxfp4(StoredFormat):
    """MXFP4 experts as in gpt-oss (OpenAI 2025).

    32 inputs are 16 bytes of `..._blocks` [experts, outputs, groups, 16], lower four bits first, times 2^(e - 127) of
    `..._scales` [experts, outputs, groups]; the weight is [experts, inputs, outputs].
    """

    allowed: ClassVar[Allowed] = {}

    def weights(self, entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, str]]:
        """The weights with tensors `..._blocks` and `..._scales`."""
        found = {}
        for name in entries:
            plain = name.removesuffix("_blocks")
            if plain != name:
                if f"{plain}_scales" not in entries:
                    raise self.fail(f"{plain}_scales", f"is missing, although {name!r} is present")
                found[plain] = {"blocks": name, "scales": f"{plain}_scales"}
        return found

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape [experts, inputs, outputs]."""
        blocks, scales = entries[parts["blocks"]], entries[parts["scales"]]
        bytes_of = blocks.dtype == scales.dtype == "U8"
        if not bytes_of or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
            raise self.fail(name, f"blocks {list(blocks.shape)} and scales {list(scales.shape)} do not fit")
        experts, outputs, groups, _ = blocks.shape
        return experts, groups * 32, outputs

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight [experts, inputs, outputs] in float32."""
        import torch

        blocks, scales = parts["blocks"], parts["scales"].int() - SCALE_BIAS
        levels = torch.tensor(FP4, device=blocks.device)
        both = torch.stack([levels[(blocks & 15).long()], levels[(blocks >> 4).long()]], dim=-1).flatten(-2)
        return torch.ldexp(both, scales[..., None]).flatten(2).transpose(1, 2)


class PackedTensors(Grouped):
    """Weights of compressed-tensors (llm-compressor, vLLM) in integers of 2, 4 or 8 bits, NVFP4, MXFP4 or MXFP8.

    A tensor's type and its neighbours say how it is stored: `weight_packed`, int32 words of integers plus 2^(bits - 1)
    or bytes of two FP4 numbers, or `weight` in eight bits; `weight_scale` [outputs, groups] is a float, or uint8 for a
    power of two, divided by `weight_global_scale` where there is one. Quantisation of inputs is not followed.
    """

    formats: ClassVar[tuple[str, ...]] = (
        *("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"),
        *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
    )
    allowed: ClassVar[Allowed] = {**CompressedTensors.allowed, "format": formats}
    known: ClassVar[Allowed] = {
        **CompressedTensors.of_weights,
        **dict.fromkeys(("num_bits", "group_size", "actorder", "symmetric")),
        "type": ("int", "float"),
    }

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        StoredFormat.__init__(self, config, path)
        groups = config.get("config_groups")
        counts: set[Any] = set()
        if not isinstance(groups, Mapping) or not groups:
            raise refused(path, "config_groups", groups, "a description of the weights")
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                raise refused(path, f"config_groups.{name}.weights", weights, "an object")
            require_known(weights, self.known, path, f"config_groups.{name}.weights.")
            if weights.get("type") == "int":
                counts.add(weights.get("num_bits"))
        if len(counts) > 1 or not counts <= {2, 4, 8}:
            given = f"integers of {', '.join(sorted(map(str, counts)))} bits"
            raise refused(path, "config_groups", given, "integers of 2, 4 or 8 bits, the same in all groups")
        self.bits, self.unordered = counts.pop() if counts else 4, set()

    def weights(self, entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, str]]:
        """The weights that are packed, or have eight bits and scales."""
        found: dict[str, dict[str, str]] = {}
        for name, entry in entries.items():
            layer, _, leaf = name.rpartition(".")
            if leaf != "weight_packed" and not (leaf == "weight" and entry.dtype in ("I8", FLOAT8)):
                continue
            others = ("scale", "zero_point", "global_scale", "g_idx", "shape")
            parts = {other: f"{layer}.weight_{other}" for other in others if f"{layer}.weight_{other}" in entries}
            inputs = ("input_scale", "input_zero_point", "input_global_scale")
            parts |= {other: f"{layer}.{other}" for other in inputs if f"{layer}.{other}" in entries}
            if "scale" not in parts:
                raise self.fail(f"{layer}.weight_scale", f"is missing, although {name!r} is present")
            found[f"{layer}.weight"] = {"codes": name, **parts}
        return found

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape [outputs, inputs]."""
        codes, scale = entries[parts["codes"]], entries[parts["scale"]].shape
        each = {"I32": 32 // self.bits, "U8": 2, "I8": 1, FLOAT8: 1}.get(codes.dtype)
        if each is None or len(codes.shape) != 2:
            raise self.fail(name, f"is {codes.dtype} {list(codes.shape)}; needed: a matrix of I32, U8, I8 or {FLOAT8}")
        outputs, inputs = codes.shape[0], codes.shape[1] * each
        # One scale, one for each output, or one for each group of an output's inputs.
        groups = 1 if prod(scale) == 1 or scale == (outputs,) else scale[-1]
        if prod(scale) not in (1, outputs * groups) or inputs % groups:
            raise self.fail(name, f"of shape {[outputs, inputs]} has scales of shape {list(scale)}")
        if "g_idx" in parts and entries[parts["g_idx"]].shape != (inputs,):
            raise self.fail(name, f"has {list(entries[parts['g_idx']].shape)} groups of inputs for {inputs} inputs")
        return outputs, inputs

    def kept_bytes(self, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> int | None:
        """See `StoredFormat`; None for formats that no kernel multiplies."""
        packed = self.bits == 4 and entries[parts["codes"]].dtype == "I32" and parts.get("g_idx") not in self.unordered
        return StoredFormat.kept_bytes(self, parts, entries) if packed else None

    def in_blocks(self, name: str, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The weight in blocks of integers, where it has four bits; see `Grouped`."""
        import torch

        if self.bits != 4 or parts["codes"].dtype != torch.int32:
            return None
        scales = self._spread(parts["scale"].float(), parts).T.contiguous()
        inputs = parts["codes"].shape[1] * 8
        order = self._group(parts, inputs, len(scales))
        return super().in_blocks(name, {**parts, "scales": scales, "g_idx": order})

    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `Grouped.numbers`; both are increased by 2^(bits - 1), as they are stored."""
        import torch

        numbers = unpacked(parts["codes"], self.bits).T
        if "zero_point" in parts:
            return numbers, unpacked(parts["zero_point"].T.contiguous(), self.bits)[:, : numbers.shape[1]]
        return numbers, torch.full_like(parts["scales"], 1 << (self.bits - 1), dtype=torch.int32)

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight [outputs, inputs]: the differences of codes from zero points, times their scales."""
        import torch

        codes, scale = parts["codes"], parts["scale"]
        scales = torch.exp2(scale.float() - SCALE_BIAS) if scale.dtype == torch.uint8 else scale.float()
        if "global_scale" in parts:
            scales = scales / parts["global_scale"].float()
        scales = self._spread(scales, parts)
        if codes.dtype == torch.int32:
            numbers, zeros = self.numbers({**parts, "scales": scales.T})
            numbers, zeros = numbers.T, zeros.T
        elif codes.dtype == torch.uint8:
            levels = torch.tensor(FP4, device=codes.device)
            numbers, zeros = levels[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()], levels[:1, None]
        else:
            zero = parts.get("zero_point")
            numbers = codes.float()
            zeros = numbers.new_zeros(1, 1) if zero is None else self._spread(zero.float(), parts)
        group = self._group(parts, numbers.shape[1], scales.shape[1])
        return (numbers - zeros.expand(len(numbers), scales.shape[1])[:, group]) * scales[:, group]

    def _spread(self, scales: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Scales [outputs, groups]."""
        outputs = len(parts["codes"])
        return scales.reshape(1, 1).expand(outputs, 1) if scales.numel() == 1 else scales.reshape(outputs, -1)

    def _group(self, parts: Mapping[str, Tensor], inputs: int, groups: int) -> Tensor:
        """The group of each input."""
        import torch

        if "g_idx" in parts and int(parts["g_idx"].min()) >= 0:
            found = parts["g_idx"].long()
            if int(found.max()) >= groups:
                raise self.fail("weight_g_idx", f"refers to a group outside 0 to {groups - 1}")
            return found
        return torch.arange(inputs, device=parts["codes"].device) // (inputs // groups)


def compressed_tensors(config: Mapping[str, Any], path: Path) -> StoredFormat:
    """The format of compressed-tensors that a `quantization_config` describes: FP8, which kernels multiply, or another.

    Raises `Incompatible` naming what is not supported.
    """
    groups = config.get("config_groups")
    described = groups.values() if isinstance(groups, Mapping) else ()
    whole = any('"type": "int"' in json.dumps(group) for group in described)
    form = config.get("format")
    plain = form == "float-quantized" or (form == "naive-quantized" and not whole)
    return CompressedTensors(config, path) if plain else PackedTensors(config, path)
