"""Folders with quantised weights (`quantization_config`): GPTQ, AWQ, FP8, MXFP4 and GGUF's blocks.

When a weight is read, it is dequantised to float32 by the formula of the format's reference, or stays as stored where
kernels multiply it in that form.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import CheckpointInvalid

from attn_models.weights.block_layouts import INT4_ZEROS
from attn_models.weights.fp8_weights import CompressedTensors, Fp8
from attn_models.weights.gguf_blocks import Gguf
from attn_models.weights.safetensors_files import LazyTensors, TensorEntry, is_finite
from attn_models.weights.stored_format import CONFIG_KEY, Allowed, StoredFormat, refused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attn_models.weights.checkpoint_folder import CheckpointFolder

Read = Callable[[str], "Tensor"]


def with_plain_weights(checkpoint: CheckpointFolder, *, in_blocks: bool = False) -> CheckpointFolder:
    """The folder with dequantised weights and a config.json without `quantization_config`; unchanged if it has none.

    With `in_blocks`, weights that kernels multiply as stored are returned as `BlockTensor`.

    Raises `Incompatible` naming the part of the `quantization_config` that is not supported, and `CheckpointInvalid`
    for tensors that do not fit the format.
    """
    stored = format_of(checkpoint.config, checkpoint.path / "config.json")
    if stored is None:
        return checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key != CONFIG_KEY}
    return dataclasses.replace(checkpoint, config=config, tensors=DequantizedTensors(checkpoint, stored, in_blocks))


def format_of(config: Mapping[str, Any], path: Path) -> StoredFormat | None:
    """The storage format of the weights of a config.json, None where they are plain; raises as `with_plain_weights`."""
    given = config.get(CONFIG_KEY)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise CheckpointInvalid.of(path, f"{CONFIG_KEY} must be an object")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise refused(path, "quant_method", method, " or ".join(repr(name) for name in FORMATS))
    return FORMATS[method](given, path)


class DequantizedTensors(LazyTensors):
    """The tensors of a folder by their plain names; quantised ones are dequantised when they are read."""

    def __init__(self, checkpoint: CheckpointFolder, stored: StoredFormat, in_blocks: bool = False) -> None:  # noqa: FBT001, FBT002
        import torch

        self._inner = checkpoint.tensors
        self._path, self._format = checkpoint.path, stored
        self.nonfinite, self.device = self._inner.nonfinite, self._inner.device
        self._in_blocks = in_blocks and torch.device(self.device).type in stored.devices
        weights = stored.weights(self._inner.entries)
        if not weights:
            rule = f"{CONFIG_KEY}: names {type(stored).__name__}, but no tensor is stored in that format; allowed: null"
            raise CheckpointInvalid.of(checkpoint.path / "config.json", rule)
        used = {name for parts in weights.values() for name in parts.values()}
        self._parts = weights
        plain = {name: entry for name, entry in self._inner.entries.items() if name not in used}
        if both := sorted(plain.keys() & weights.keys()):
            raise CheckpointInvalid.of(checkpoint.path, f"tensor {both[0]!r} is present both plain and quantised")
        shapes = {name: stored.shape(name, parts, self._inner.entries) for name, parts in weights.items()}
        self.entries = plain | {name: TensorEntry("F32", shape, 4 * prod(shape)) for name, shape in shapes.items()}

    def _kept(self) -> dict[str, int]:
        """The size in bytes of each weight that stays as stored."""
        if not self._in_blocks:
            return {}
        sizes = {name: self._format.kept_bytes(parts, self._inner.entries) for name, parts in self._parts.items()}
        return {name: nbytes for name, nbytes in sizes.items() if nbytes is not None}

    def saved_bytes(self, dtype: torch.dtype) -> int:
        """See `LazyTensors`: weights that stay as stored keep their stored size."""
        return sum(prod(self.entries[name].shape) * dtype.itemsize - nbytes for name, nbytes in self._kept().items())

    def types(self) -> set[str]:
        """See `LazyTensors`: weights that stay as stored are not included."""
        kept = self._kept()
        return {entry.dtype for name, entry in self.entries.items() if name not in kept}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._inner[name]
        parts = {part: self._inner[own] for part, own in self._parts[name].items()}
        kept = self._format.in_blocks(name, parts) if self._in_blocks else None
        if kept is not None:
            return kept
        weight = self._format.dequantized(parts)
        if not is_finite(weight):
            raise CheckpointInvalid.of(self._path, f"tensor {name!r} holds NaN or infinity once it is dequantised")
        return weight.contiguous()


class Grouped(StoredFormat):
    """Integers packed in int32 words, with a scale and a zero point for each group of inputs."""

    names: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    bits: int

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        if type(config.get("bits")) is not int:
            raise refused(path, "bits", config.get("bits"), "a number of bits")
        self.bits = config["bits"]
        self.group_size = config.get("group_size", 128)
        if type(self.group_size) is not int or self.group_size < -1 or self.group_size == 0:
            raise refused(path, "group_size", self.group_size, "-1 or a whole number from 1")

    def weights(self, entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, str]]:
        """The weights with tensors `qweight`, `qzeros` and `scales`, and `g_idx` where there is one."""
        found: dict[str, dict[str, str]] = {}
        for name in entries:
            layer, _, part = name.rpartition(".")
            if part == self.names[0]:
                parts = {own: f"{layer}.{own}" for own in self.names}
                missing = [own for own in parts.values() if own not in entries]
                if missing:
                    raise self.fail(missing[0], f"is missing, although {name!r} is present")
                if f"{layer}.g_idx" in entries:
                    parts["g_idx"] = f"{layer}.g_idx"
                found[f"{layer}.weight"] = parts
        return found

    def check(self, name: str, sizes: tuple[int, int], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """The shape [outputs, inputs] of a weight, where `sizes` are its inputs and outputs.

        Raises `CheckpointInvalid` where scales and zero points do not have the shapes of the groups.
        """
        inputs, outputs = sizes
        groups = 1 if self.group_size == -1 else ceil(inputs / self.group_size)
        expected = {"scales": (groups, outputs), "qzeros": (groups, outputs * self.bits // 32), "g_idx": (inputs,)}
        for part, shape in shapes.items():
            if part in expected and shape != expected[part]:
                raise self.fail(name, f"{part} has shape {list(shape)}; needed: {list(expected[part])}")
        return outputs, inputs

    @abstractmethod
    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The integers [inputs, outputs] of a weight, and the zero points [groups, outputs]."""

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight [outputs, inputs]: the scale times the difference from the zero point."""
        numbers, zeros = self.numbers(parts)
        group = self.group_of(parts, len(numbers))
        return (parts["scales"].float()[group] * (numbers - zeros[group])).T

    def in_blocks(self, name: str, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The weight in `INT4_ZEROS` blocks, if it has 4 bits, consecutive groups of whole blocks, float16 scales."""
        import torch

        from attn_models.quantization.block_tensor import BlockTensor

        if self.bits != 4:
            return None
        numbers, zeros = self.numbers(parts)
        inputs = len(numbers)
        size = inputs if self.group_size == -1 else self.group_size
        scales = parts["scales"].half()
        group = self.group_of(parts, inputs)
        in_order = torch.equal(group, torch.arange(inputs, device=group.device) // size)
        if size % INT4_ZEROS.inputs or inputs % size or not in_order:
            return None
        if not torch.equal(scales.float(), parts["scales"].float()):
            return None
        if not is_finite(scales):
            raise self.fail(name, "has scales that are NaN or infinite")
        blocks_per_group = size // INT4_ZEROS.inputs
        block_scales, block_zeros = (
            part.T.repeat_interleave(blocks_per_group, 1).contiguous() for part in (scales, zeros)
        )
        blocks = numbers.T.reshape(numbers.shape[1], -1, 2, 16).to(torch.uint8)
        codes = blocks[:, :, 0] | blocks[:, :, 1] << 4
        whole = torch.cat(
            [block_scales[..., None].view(torch.uint8), block_zeros[..., None].to(torch.uint8), codes], dim=-1
        )
        return BlockTensor(whole.flatten(1), INT4_ZEROS)

    def group_of(self, parts: Mapping[str, Tensor], inputs: int) -> Tensor:
        """The group index of each input, [inputs]."""
        import torch

        scales = parts["scales"]
        if "g_idx" in parts:
            group = parts["g_idx"].long()
            if int(group.min()) < 0 or int(group.max()) >= len(scales):
                raise CheckpointInvalid.of(
                    self.path.parent, f"a g_idx refers to a group outside 0 to {len(scales) - 1}"
                )
            return group
        size = inputs if self.group_size == -1 else self.group_size
        return torch.arange(inputs, device=scales.device) // size


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack integers of `bits` bits from int32 words [..., words], lowest first: int32 [..., words * 32 / bits]."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)


class Gptq(Grouped):
    """GPTQ (Frantar et al. 2022, arXiv 2210.17323) as written by AutoGPTQ and GPTQModel: w = s (q - z), packed along
    the inputs. `gptq` stores z - 1, `gptq_v2` z."""

    allowed: ClassVar[Allowed] = {
        "bits": (2, 4, 8),
        "group_size": None,
        "format": ("gptq", "gptq_v2", None),
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "is_marlin_format": (False, None),
        "dynamic": (None, {}),
        "pack_dtype": ("int32", None),
    }

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stored = config.get("checkpoint_format") or config.get("format")
        self.zero_offset = 0 if stored == "gptq_v2" else 1

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape [outputs, inputs]."""
        shapes = {part: entries[own].shape for part, own in parts.items()}
        if len(shapes["qweight"]) != 2:
            raise self.fail(name, f"qweight has shape {list(shapes['qweight'])}; a matrix is needed")
        rows, outputs = shapes["qweight"]
        return self.check(name, (rows * 32 // self.bits, outputs), shapes)

    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `Grouped.numbers`."""
        numbers = unpacked(parts["qweight"].T.contiguous(), self.bits).T
        return numbers, unpacked(parts["qzeros"], self.bits) + self.zero_offset


class Awq(Grouped):
    """AWQ (Lin et al. 2023, arXiv 2306.00978) as stored for AutoAWQ's GEMM kernels: w = s (q - z), eight outputs to a
    word in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    allowed: ClassVar[Allowed] = {
        "bits": (4,),
        "group_size": None,
        "version": ("gemm", "GEMM", None),
        "zero_point": (True,),
        "modules_to_fuse": (None,),
        "format": ("gemm", None),
    }
    order: ClassVar[tuple[int, ...]] = (0, 4, 1, 5, 2, 6, 3, 7)
    """The positions in a word of the outputs 0 to 7."""

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape [outputs, inputs]."""
        shapes = {part: entries[own].shape for part, own in parts.items()}
        if len(shapes["qweight"]) != 2:
            raise self.fail(name, f"qweight has shape {list(shapes['qweight'])}; a matrix is needed")
        inputs, words = shapes["qweight"]
        return self.check(name, (inputs, words * 32 // self.bits), shapes)

    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `Grouped.numbers`."""
        return self._in_order(parts["qweight"]), self._in_order(parts["qzeros"])

    def _in_order(self, words: Tensor) -> Tensor:
        numbers = unpacked(words, self.bits)
        return numbers.view(len(words), -1, 8)[..., list(self.order)].flatten(1)


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


FORMATS: Mapping[str, type[StoredFormat]] = {
    "gptq": Gptq,
    "awq": Awq,
    "fp8": Fp8,
    "compressed-tensors": CompressedTensors,
    "mxfp4": Mxfp4,
    "gguf": Gguf,
}
"""Formats by `quant_method`."""
