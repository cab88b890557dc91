"""Integers with a scale and a zero point for each group of inputs, packed in words of 32 bits: GPTQ and AWQ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import CheckpointInvalid

from attn_models.weights.block_layouts import INT4_ZEROS
from attn_models.weights.safetensors_files import LazyTensors, TensorEntry, is_finite
from attn_models.weights.stored_format import Allowed, StoredFormat, refused

if TYPE_CHECKING:
    from torch import Tensor


class Grouped(StoredFormat):
    """Integers packed in int32 words, with a scale and a zero point for each group of inputs."""

    names: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    bits: int
    varied = False
    """Whether weights may have bits and groups of their own, as their shapes say."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        if type(config.get("bits")) is not int:
            raise refused(path, "bits", config.get("bits"), "a number of bits")
        self.bits = config["bits"]
        self.group_size = config.get("group_size", 128)
        if type(self.group_size) is not int or self.group_size < -1 or self.group_size == 0:
            raise refused(path, "group_size", self.group_size, "-1 or a whole number from 1")
        self.unordered: set[str] = set()

    def open(self, tensors: LazyTensors) -> None:
        """Find the weights whose groups are not of consecutive inputs, which no kernel multiplies."""
        orders = (name for name in tensors.entries if name.endswith("g_idx"))
        self.unordered = {name for name in orders if bool((tensors[name].diff() < 0).any())}

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
        if self.varied and len(shapes["scales"]) == 2:
            groups = shapes["scales"][0]
        words = outputs * self.bits_of(shapes) // 32
        expected = {"scales": (groups, outputs), "qzeros": (groups, words), "g_idx": (inputs,)}
        for part, shape in shapes.items():
            if part in expected and shape != expected[part]:
                raise self.fail(name, f"{part} has shape {list(shape)}; needed: {list(expected[part])}")
        return outputs, inputs

    def kept_bytes(self, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> int | None:
        """See `StoredFormat`; None for weights that `in_blocks` does not give."""
        inputs, groups = self.shape("", parts, entries)[1], entries[parts["scales"]].shape[0]
        whole = self.bits_of({part: entries[own].shape for part, own in parts.items()}) == 4
        if not whole or inputs % (groups * INT4_ZEROS.inputs) or parts.get("g_idx") in self.unordered:
            return None
        return super().kept_bytes(parts, entries)

    def bits_of(self, shapes: Mapping[str, tuple[int, ...]]) -> int:  # noqa: ARG002 -- of one format
        """The number of bits of the weight whose parts have these shapes."""
        return self.bits

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

        if self.bits_of({part: tuple(tensor.shape) for part, tensor in parts.items()}) != 4:
            return None
        numbers, zeros = self.numbers(parts)
        scales = parts["scales"].half()
        inputs = len(numbers)
        size = ceil(inputs / len(scales))
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
        return torch.arange(inputs, device=scales.device) // ceil(inputs / len(scales))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack integers of `bits` bits from int32 words [..., words], lowest first: int32 [..., words * 32 / bits].

    Those of 3 bits follow each other across the borders of words.
    """
    import torch

    if 32 % bits:
        digits = unpacked(words, 1).view(*words.shape[:-1], -1, bits)
        whole: Tensor = (digits << torch.arange(bits, dtype=torch.int32, device=words.device)).sum(
            -1, dtype=torch.int32
        )
        return whole
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)


class Gptq(Grouped):
    """GPTQ (Frantar et al. 2022, arXiv 2210.17323) as written by AutoGPTQ and GPTQModel: w = s (q - z), packed along
    the inputs. `gptq_v2` stores the words of z; `gptq` those words minus that of ones, or z - 1 modulo 8 of 3 bits."""

    allowed: ClassVar[Allowed] = {
        "bits": (2, 3, 4, 8),
        "group_size": None,
        "format": ("gptq", "gptq_v2", None),
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "is_marlin_format": (False, None),
        "dynamic": None,
        "pack_dtype": ("int32", None),
    }

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stored = config.get("checkpoint_format") or config.get("format")
        self.less_one, self.varied = stored != "gptq_v2", bool(config.get("dynamic"))

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape [outputs, inputs]."""
        shapes = {part: entries[own].shape for part, own in parts.items()}
        if len(shapes["qweight"]) != 2:
            raise self.fail(name, f"qweight has shape {list(shapes['qweight'])}; a matrix is needed")
        rows, outputs = shapes["qweight"]
        bits = self.bits_of(shapes)
        if bits not in (2, 3, 4, 8):
            raise self.fail(name, f"has qweight {[rows, outputs]} for g_idx {list(shapes['g_idx'])}: {bits} bits")
        return self.check(name, (rows * 32 // bits, outputs), shapes)

    def bits_of(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """See `Grouped`: with `dynamic`, the bits of the words for each input."""
        if not self.varied or len(shapes.get("g_idx", ())) != 1:
            return self.bits
        return shapes["qweight"][0] * 32 // max(shapes["g_idx"][0], 1)

    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `Grouped.numbers`."""
        bits = self.bits_of({part: tuple(tensor.shape) for part, tensor in parts.items()})
        numbers, zeros = unpacked(parts["qweight"].T.contiguous(), bits).T, parts["qzeros"]
        if self.less_one and bits == 3:
            return numbers, (unpacked(zeros, bits) + 1) & 7
        # A zero point of 0 has borrowed from the next one in its word.
        ones = sum(1 << place for place in range(0, 32, bits)) if self.less_one else 0
        return numbers, unpacked(zeros + ones, bits)


class Awq(Grouped):
    """AWQ (Lin et al. 2023, arXiv 2306.00978) as stored for AutoAWQ's GEMM kernels: w = s (q - z), eight outputs to a
    word in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    allowed: ClassVar[Allowed] = {
        "bits": (4,),
        "group_size": None,
        **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm", "GEMM", "exllama", None)),
        "zero_point": (True, False, None),
        "modules_to_fuse": (None,),
        "pack_dtype": ("int32", None),
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


class AwqGemv(Grouped):
    """AWQ for AutoAWQ's GEMV kernels: eight inputs of an output to a word, in their order; or for its `gemv_fast`.

    There 64 inputs of four outputs are 256 integers, four to a word of 16 bits, and zero points are the floats -s z.
    Both have more groups than the inputs need, the last without meaning. No kernel multiplies them as stored.
    """

    allowed: ClassVar[Allowed] = {
        **Awq.allowed,
        **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemv", "gemv_fast", None)),
    }

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape [outputs, inputs]."""
        codes, zeros, scales = (entries[parts[part]] for part in self.names)
        if {len(entry.shape) for entry in (codes, scales, zeros)} != {2}:
            raise self.fail(name, "has a qweight, scales or qzeros that is not a matrix")
        fast = codes.dtype == "I16"
        outputs, inputs = (4 * codes.shape[0], codes.shape[1]) if fast else (codes.shape[0], 8 * codes.shape[1])
        groups = scales.shape[0] if fast else scales.shape[1]
        needed = ((groups, outputs), (groups, outputs)) if fast else ((outputs, groups), (outputs, groups // 8))
        size = inputs if self.group_size == -1 else self.group_size
        if (scales.shape, zeros.shape) != needed or inputs % max(size, 64 * fast) or inputs // size > groups:
            given = f"qweight {list(codes.shape)}, scales {list(scales.shape)}, qzeros {list(zeros.shape)}"
            raise self.fail(name, f"has {given}, which do not fit groups of {size} inputs")
        return outputs, inputs

    def kept_bytes(self, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> int | None:  # noqa: ARG002
        """None: see the class."""
        return None

    def in_blocks(self, name: str, parts: Mapping[str, Tensor]) -> Tensor | None:  # noqa: ARG002
        """None: see the class."""
        return None

    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `Grouped.numbers`; the zero points of `gemv_fast` are what is subtracted from the product."""
        import torch

        codes, zeros = parts["qweight"], parts["qzeros"]
        if codes.dtype != torch.int16:
            return unpacked(codes, self.bits).T, unpacked(zeros, self.bits).T
        digits = torch.stack([codes >> shift & 15 for shift in (0, 4, 8, 12)], -1).view(len(codes), -1, 4, 64)
        # Each 8 of 32 inputs are 4 pairs, whose first numbers come first; of these pairs each fourth ones are a row.
        pairs = digits.transpose(1, 2).reshape(4 * len(codes), -1, 4, 2, 4).mT
        return pairs.transpose(2, 3).flatten(1).T.int(), -zeros.float()

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """See `Grouped.dequantized`."""
        import torch

        fast = parts["qweight"].dtype == torch.int16
        numbers, zeros = self.numbers(parts)
        scales = (parts["scales"] if fast else parts["scales"].T).float()
        group = torch.arange(len(numbers), device=scales.device) // (
            len(numbers) if self.group_size == -1 else self.group_size
        )
        product = scales[group] * (numbers if fast else numbers - zeros[group])
        return (product - zeros[group] if fast else product).T


def awq(config: Mapping[str, Any], path: Path) -> StoredFormat:
    """The format of AWQ that a `quantization_config` names; raises `Incompatible` naming what is not supported."""
    named = str(config.get("version") or config.get("checkpoint_format") or config.get("format")).lower()
    return AwqGemv(config, path) if named.startswith("gemv") else Awq(config, path)
