"""Quantization schemes of cached rows: which tensors ("parts") replace a field, and how they are encoded and decoded.

Importing this module does not load torch, so that the size of a quantized cache can be computed without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from attn_core import Field, Fields, Paged
from attn_core.errors import Incompatible, InvalidValue
from attn_core.stores import ModelSpecs

if TYPE_CHECKING:
    from torch import Tensor, dtype

MIN_CHANNELS = 4
"""Rows with fewer channels are not quantized: their codes and scale would take more bytes than the row."""

BIT_WIDTHS = (2, 4, 8)


class Quantizer(Protocol):
    """Encodes tensors [..., channels] as named parts, and decodes them."""

    @property
    def form(self) -> str | None:
        """The name of this format in `attn_core.RowsInPlace.form`; None if no kernel reads it."""
        ...

    def parts(self, shape: tuple[int, ...]) -> dict[str, Field]:
        """Shape and dtype of the parts of a tensor of this shape."""
        ...

    def encode(self, numbers: Tensor) -> dict[str, Tensor]:
        """The parts of `numbers` [..., channels]; a group with a non-finite number gets a non-finite scale."""
        ...

    def decode(self, parts: Fields, size: int, into: dtype) -> Tensor:
        """The dequantized tensor [..., size] in the dtype `into`."""
        ...


@dataclass(frozen=True)
class Half:
    """Rounding to the nearest float16: the error of a number from 6e-5 to 65504 is at most 1/2048 of it."""

    @property
    def form(self) -> str | None:
        """See `Quantizer.form`."""
        return "float16"

    def parts(self, shape: tuple[int, ...]) -> dict[str, Field]:
        """`codes` [..., channels], float16."""
        return {"codes": Field(shape, "float16")}

    def encode(self, numbers: Tensor) -> dict[str, Tensor]:
        """See `Quantizer.encode`; numbers beyond 65504 become infinite."""
        return {"codes": numbers.half()}

    def decode(self, parts: Fields, size: int, into: dtype) -> Tensor:  # noqa: ARG002  one code per number
        """See `Quantizer.decode`."""
        return parts["codes"].to(into)


@dataclass(frozen=True)
class Symmetric:
    """Symmetric int8 quantization with one scale for the whole last axis: x = scale * code, |code| <= 127.

    The scale is the largest magnitude / 127, so the error of a number is at most 1/254 of that magnitude.
    """

    @property
    def form(self) -> str | None:
        """See `Quantizer.form`."""
        return "int8"

    def parts(self, shape: tuple[int, ...]) -> dict[str, Field]:
        """`codes` [..., channels], int8, and `scale` [...], float16."""
        return {"codes": Field(shape, "int8"), "scale": Field(shape[:-1], "float16")}

    def encode(self, numbers: Tensor) -> dict[str, Tensor]:
        """See `Quantizer.encode`."""
        from attn_cache.integer_codes import quantize_symmetric

        codes, scale = quantize_symmetric(numbers)
        return {"codes": codes, "scale": scale}

    def decode(self, parts: Fields, size: int, into: dtype) -> Tensor:  # noqa: ARG002  one code per number
        """See `Quantizer.decode`."""
        scaled: Tensor = parts["codes"] * parts["scale"].float()[..., None]
        return scaled.to(into)


@dataclass(frozen=True)
class Affine:
    """Asymmetric quantization to `bits` bits in groups of `group` adjacent channels: x = low + step * code.

    The step is the range of the group / (2^bits - 1), so the error of a number is at most half a step (Liu et al. 2024,
    "KIVI", arXiv 2402.02750, section 3.1). Codes are packed into bytes, the first code in the lowest bits.
    """

    bits: int
    group: int

    @property
    def form(self) -> str | None:
        """See `Quantizer.form`."""
        return "int4" if (self.bits, self.group) == (4, 32) else None

    def parts(self, shape: tuple[int, ...]) -> dict[str, Field]:
        """`codes` [..., bytes], uint8, and `step` and `low` [..., groups], float16."""
        *lead, size = shape
        groups = Field((*lead, -(-size // self.group)), "float16")
        return {"codes": Field((*lead, -(-size * self.bits // 8)), "uint8"), "step": groups, "low": groups}

    def encode(self, numbers: Tensor) -> dict[str, Tensor]:
        """See `Quantizer.encode`."""
        from attn_cache.integer_codes import pack_bits, quantize_affine

        codes, step, low = quantize_affine(numbers, self.group, 2**self.bits - 1)
        return {"codes": pack_bits(codes, self.bits), "step": step, "low": low}

    def decode(self, parts: Fields, size: int, into: dtype) -> Tensor:
        """See `Quantizer.decode`."""
        from attn_cache.integer_codes import dequantize_affine, unpack_bits

        codes = unpack_bits(parts["codes"], self.bits, size)
        return dequantize_affine(codes, parts["step"], parts["low"], self.group).to(into)


def is_quantized(field: Field) -> bool:
    """Whether a field is quantized: not if it has a dtype of its own, or fewer than `MIN_CHANNELS` channels."""
    return field.dtype is None and bool(field.shape) and field.shape[-1] >= MIN_CHANNELS


def part_name(field: str, part: str) -> str:
    """The name of a part among the fields of a quantized state, such as "key.codes"."""
    return f"{field}.{part}"


def quantized_specs(specs: ModelSpecs, quantizer: Quantizer) -> ModelSpecs:
    """`specs` with the fields of every `Paged` state replaced by their parts; other states are unchanged."""
    return {
        layer: {
            state: dataclasses.replace(spec, fields=_quantized_fields(spec.fields, quantizer))
            if isinstance(spec, Paged)
            else spec
            for state, spec in states.items()
        }
        for layer, states in specs.items()
    }


def _quantized_fields(fields: Mapping[str, Field], quantizer: Quantizer) -> dict[str, Field]:
    found: dict[str, Field] = {}
    for name, field in fields.items():
        if is_quantized(field):
            found |= {part_name(name, part): row for part, row in quantizer.parts(field.shape).items()}
        else:
            found[name] = field
    return found


@dataclass(frozen=True, kw_only=True)
class KiviLayout:
    """KIVI: blocks of `block` tokens, quantized to `bits` bits in groups of `group` numbers once a block is full.

    Keys are quantized per channel (groups of tokens), everything else per token (groups of channels): a few channels of
    keys are large for every token, so a group within one channel has a small range; values have no such channels.
    Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv 2402.02750.
    """

    bits: int = 2
    group: int = 32
    block: int = 128

    def __post_init__(self) -> None:
        if self.bits not in BIT_WIDTHS:
            raise InvalidValue.of("bits", self.bits, f"one of {BIT_WIDTHS}")
        if self.group < 1:
            raise InvalidValue.of("group", self.group, "a whole number from 1")
        if self.block < 1 or self.block % self.group:
            raise InvalidValue.of("block", self.block, f"a multiple of the group, {self.group}")

    def specs(self, specs: ModelSpecs) -> ModelSpecs:
        """`specs` with the fields of every `Paged` state replaced by the parts of one block.

        Raises `Incompatible` for a state with a row per several tokens, whose blocks would not have `block` rows.
        """
        for layer, states in specs.items():
            for state, spec in states.items():
                if isinstance(spec, Paged) and spec.every > 1:
                    what = f"{layer}.{state} has one row per {spec.every} tokens"
                    raise Incompatible(f"{what}; kivi quantizes blocks of {self.block} rows of one token each")
        return {
            layer: {
                state: dataclasses.replace(
                    spec,
                    fields={k: v for name, field in spec.fields.items() for k, v in self.parts(name, field).items()},
                )
                if isinstance(spec, Paged)
                else spec
                for state, spec in states.items()
            }
            for layer, states in specs.items()
        }

    def parts(self, name: str, field: Field) -> dict[str, Field]:
        """The parts of one block of a field; a field that is not quantized keeps its rows [block, *shape]."""
        if not is_quantized(field):
            return {name: Field((self.block, *field.shape), field.dtype)}
        shape = (*field.shape, self.block) if is_key(name) else (self.block, *field.shape)
        return {part_name(name, part): row for part, row in self._quantizer.parts(shape).items()}

    def encode(self, name: str, field: Field, rows: Tensor) -> dict[str, Tensor]:
        """The parts [blocks, ...] of full blocks of rows [blocks, block, *shape]."""
        if not is_quantized(field):
            return {name: rows}
        numbers = rows.movedim(1, -1) if is_key(name) else rows
        return {part_name(name, part): found for part, found in self._quantizer.encode(numbers).items()}

    def decode(self, name: str, field: Field, stored: Fields, into: dtype) -> Tensor:
        """The dequantized rows [blocks, block, *shape] of parts [blocks, ...]."""
        if not is_quantized(field):
            return stored[name]
        parts = {part: stored[part_name(name, part)] for part in self._quantizer.parts((self.block,))}
        if is_key(name):
            return self._quantizer.decode(parts, self.block, into).movedim(-1, 1)
        return self._quantizer.decode(parts, field.shape[-1], into)

    @property
    def _quantizer(self) -> Affine:
        return Affine(self.bits, self.group)


def is_key(name: str) -> bool:
    """Whether a field of this name holds keys, which are quantized per channel."""
    return "key" in name
