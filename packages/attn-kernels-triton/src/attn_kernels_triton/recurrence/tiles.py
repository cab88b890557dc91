"""Launch parameters (tile sizes, warps, stages) of the recurrence kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from attn_kernels_triton.kernels.recurrence import ScanTile
from attn_kernels_triton.launch import power_of_two


class ScanChoice(NamedTuple):
    """Launch parameters: channels of keys and of values in a tile, warps, and stages of the software pipeline."""

    keys: int
    values: int
    warps: int
    stages: int


CHUNKS = {True: 64, False: 32}
"""The number of tokens of a chunk, by whether elements have 16 bits."""

SCAN_CHOICES: dict[tuple[str, bool, bool, int], ScanChoice] = {
    ("correct", True, False, 128): ScanChoice(64, 64, 4, 1),
    ("uncorrect", True, False, 128): ScanChoice(64, 64, 4, 1),
    ("remember", True, False, 128): ScanChoice(64, 16, 4, 3),
    ("unremember", True, False, 128): ScanChoice(64, 32, 4, 2),
    ("recall", True, False, 128): ScanChoice(64, 128, 4, 2),
    ("unrecall", True, False, 128): ScanChoice(64, 128, 4, 2),
    ("gradient_to_channels", True, False, 128): ScanChoice(64, 64, 8, 1),
    ("correct", True, True, 128): ScanChoice(64, 64, 4, 1),
    ("uncorrect", True, True, 128): ScanChoice(64, 64, 4, 1),
    ("remember", True, True, 128): ScanChoice(64, 16, 4, 3),
    ("unremember", True, True, 128): ScanChoice(64, 32, 4, 2),
    ("recall", True, True, 128): ScanChoice(64, 128, 8, 2),
    ("unrecall", True, True, 128): ScanChoice(64, 128, 8, 2),
    ("gradient_to_channels", True, True, 128): ScanChoice(32, 64, 8, 1),
    ("correct", False, False, 128): ScanChoice(32, 32, 4, 1),
    ("uncorrect", False, False, 128): ScanChoice(32, 32, 4, 1),
    ("remember", False, False, 128): ScanChoice(32, 16, 4, 1),
    ("unremember", False, False, 128): ScanChoice(32, 16, 4, 1),
    ("recall", False, False, 128): ScanChoice(32, 64, 4, 1),
    ("unrecall", False, False, 128): ScanChoice(32, 64, 4, 1),
    ("gradient_to_channels", False, False, 128): ScanChoice(16, 16, 8, 1),
    ("correct", False, True, 128): ScanChoice(32, 32, 8, 1),
    ("uncorrect", False, True, 128): ScanChoice(32, 32, 4, 1),
    ("remember", False, True, 128): ScanChoice(32, 16, 4, 1),
    ("unremember", False, True, 128): ScanChoice(32, 16, 8, 1),
    ("recall", False, True, 128): ScanChoice(32, 64, 4, 1),
    ("unrecall", False, True, 128): ScanChoice(32, 64, 4, 1),
    ("gradient_to_channels", False, True, 128): ScanChoice(16, 16, 8, 1),
    ("remember", True, False, 256): ScanChoice(64, 64, 8, 2),
    ("unremember", True, False, 256): ScanChoice(64, 32, 8, 1),
    ("gradient_to_channels", True, False, 64): ScanChoice(32, 64, 8, 1),
    ("gradient_to_channels", True, True, 64): ScanChoice(32, 32, 8, 1),
    ("gradient_to_channels", True, True, 32): ScanChoice(16, 32, 8, 1),
}
"""By kernel, whether elements have 16 bits, whether decays are per channel, and the key size; sizes without an entry
use that of 128.

Kernels that go from chunk to chunk own 16 columns of values, so that sixteen heads of 128 occupy the GPU: on an H200
the forward pass over 8192 tokens took 0.68 (additive) to 0.92 (delta rule, decay per channel) of the time of 64
columns.

Only kernels that hold all channels need entries for larger keys; one whose loop over channels has a single iteration is
unrolled, which takes registers. None spills registers on sm_90a, which a test checks."""

SPLIT = torch.version.hip is None
"""Whether float32 products are split into TF32 products, which keeps their precision; AMD's are exact by themselves."""

NARROWEST = 128
DECODED, DECODE_WARPS = 32, 8
"""The columns of values that a program of the token-by-token kernel owns, and its warps."""
DECAY_CHANNELS = 64
"""The largest number of channels whose decays a program sums."""


class ScanSizes(NamedTuple):
    """The properties of steps that launch parameters depend on: dtype, sizes, tokens, and whether decays are per
    channel."""

    dtype: torch.dtype
    key_size: int
    value_size: int
    tokens: int
    channels: bool

    @property
    def chunk(self) -> int:
        """The number of tokens of a chunk."""
        return min(CHUNKS[self.dtype.itemsize == 2], power_of_two(self.tokens))


def scan_choice(program: str, sizes: ScanSizes, measured: ScanChoice | None = None) -> ScanChoice:
    """The measured, else the default launch parameters of a kernel, with tiles no larger than the operands."""
    width = power_of_two(sizes.key_size)
    kind = program, sizes.dtype.itemsize == 2, sizes.channels
    chosen = measured or SCAN_CHOICES.get((*kind, width), SCAN_CHOICES[*kind, NARROWEST])
    return chosen._replace(keys=min(chosen.keys, width), values=min(chosen.values, power_of_two(sizes.value_size)))


def scan_tile(choice: ScanChoice, sizes: ScanSizes) -> ScanTile:
    """The compile-time constants of a kernel."""
    return ScanTile(
        chunk=tl.constexpr(sizes.chunk),
        rounds=tl.constexpr(sizes.chunk.bit_length() - 1),
        key_size=tl.constexpr(sizes.key_size),
        value_size=tl.constexpr(sizes.value_size),
        key_width=tl.constexpr(power_of_two(sizes.key_size)),
        keys_at_once=tl.constexpr(choice.keys),
        values_at_once=tl.constexpr(choice.values),
        key_parts=tl.constexpr(-(-sizes.key_size // choice.keys)),
        value_parts=tl.constexpr(-(-sizes.value_size // choice.values)),
        channels=tl.constexpr(sizes.channels),
        split=tl.constexpr(SPLIT),
    )
