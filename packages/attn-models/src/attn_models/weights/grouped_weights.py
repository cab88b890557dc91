"""Integers with a scale and a zero point for each group of inputs, packed in words of 32 bits: GPTQ and AWQ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import CheckpointInvalid

from attn_models.weights.block_layouts import INT4_ZEROS
from attn_models.weights.safetensors_files import TensorEntry, is_finite
from attn_models.weights.stored_format import Allowed, StoredFormat, refused

if TYPE_CHECKING:
    from torch import Tensor


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
