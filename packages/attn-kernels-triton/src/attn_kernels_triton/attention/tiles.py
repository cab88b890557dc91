"""Launch parameters (tile sizes, warps, stages) of the attention kernels, by kernel, dtype and head width."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Tile
from attn_kernels_triton.launch import power_of_two

Schedule = Literal["pointers", "descriptors", "paired"]
"""How a kernel reads tiles: "pointers", by the loads of its threads; "descriptors", by TMA; "paired", by TMA from a
producer warp for two consumer warp groups (forward only)."""


COMPILER = tuple(map(int, triton.__version__.split(".")[:2]))
GLUON = COMPILER < (3, 8)
"""Whether this is the Gluon in which paired kernels are written: with Triton 3.9 they do not compile."""
NEWER = COMPILER > (3, 6)
"""Whether Triton is newer than 3.6, the oldest supported version, whose register allocation differs."""


class Choice(NamedTuple):
    """Launch parameters: queries and keys of a tile, warps, stages of the software pipeline, and the `Schedule`.

    Kernels with learned biases support only "pointers".
    """

    queries: int
    keys: int
    warps: int
    stages: int
    schedule: Schedule = "pointers"


class Sizes(NamedTuple):
    """The properties of operands that launch parameters depend on: dtype, head sizes, numbers of queries and keys.

    `block` is the side of the blocks in block lists, None without lists; `varlen`, `biased` and `dropped` are whether
    rows hold several texts, biases are learned, and weights are dropped.
    """

    dtype: torch.dtype
    key_size: int
    value_size: int
    queries: int
    keys: int
    block: int | None = None
    varlen: bool = False
    biased: bool = False
    dropped: bool = False

    @property
    def width(self) -> int:
        """The larger of the head sizes of keys and values, rounded up to a power of two."""
        return power_of_two(max(self.key_size, self.value_size))


CHOICES: dict[tuple[str, bool, int], Choice] = {
    ("forward", True, 64): Choice(128, 64, 8, 3),
    ("forward", True, 128): Choice(128, 64, 8, 3),
    ("forward", True, 256): Choice(128, 32, 8, 2),
    ("forward", False, 64): Choice(32, 32, 4, 1),
    ("forward", False, 128): Choice(16, 32, 4, 1),
    ("forward", False, 256): Choice(16, 16, 4, 1),
    ("to_queries", True, 64): Choice(128, 64, 8, 2),
    ("to_queries", True, 128): Choice(128, 64, 8, 2),
    ("to_queries", True, 256): Choice(64, 32, 8, 2),
    ("to_queries", False, 64): Choice(32, 32, 4, 1),
    ("to_queries", False, 128): Choice(16, 16, 4, 1),
    ("to_queries", False, 256): Choice(16, 16, 4, 1),
    ("to_keys", True, 64): Choice(64, 128, 8, 2),
    ("to_keys", True, 128): Choice(32, 128, 8, 2),
    ("to_keys", True, 256): Choice(64, 32, 8, 1),
    ("to_keys", False, 64): Choice(16, 16, 4, 1),
    ("to_keys", False, 128): Choice(16, 16, 4, 1),
    ("to_keys", False, 256): Choice(16, 16, 4, 1),
    ("to_biases", True, 64): Choice(64, 64, 4, 2),
    ("to_biases", True, 128): Choice(64, 64, 8, 2),
    ("to_biases", True, 256): Choice(64, 64, 8, 1),
    ("to_biases", False, 64): Choice(16, 16, 4, 1),
    ("to_biases", False, 128): Choice(16, 16, 4, 1),
    ("to_biases", False, 256): Choice(16, 16, 4, 1),
}
"""By kernel, whether elements have 16 bits, and the width; none of these spills registers on sm_90a, which a test
checks."""

DENSE_CHOICES: dict[int, Choice] = {
    64: Choice(128, 64, 8, 3, "descriptors"),
    128: Choice(128, 128, 8, 3, "descriptors"),
    256: Choice(128, 64, 8, 2, "descriptors"),
}
"""For the forward kernel with TMA (band masks, elements of 16 bits), by width.

With two stages only one tile is in flight, and it is not fetched during computation. On an H200 three took 0.86 of the
time at width 128: 581 TFLOP/s over 8192 full and 568 causal, 0.85 and 0.93 of cuDNN; at width 64 0.98 and 0.94.
"""

PAIRED_CHOICES: dict[int, Choice] = {128: Choice(128, 128, 4, 2, "paired")}
"""For the paired kernel, over full and causal masks and whole tiles: on an H200 692 TFLOP/s over 8192 full and 642
causal, 1.01 and 1.05 of cuDNN. At width 64 it was slower than the other kernels."""

DENSE_BACKWARD: dict[int, tuple[Choice, Choice]] = {
    64: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 64, 4, 3, "descriptors")),
    128: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 128, 8, 3, "descriptors")),
}
"""For the two backward kernels with TMA, the one that owns queries and the one that owns keys.

On an H200 both together took 0.86 of the time of one kernel for all gradients, which adds those of queries in several
buffers, over 4096 full and 0.7 causal, at width 128; at width 64 the one that owns keys took 0.67 of the time of tiles
of 64 by 128, over 8192."""

DENSE_BACKWARD_BOUNDED: dict[int, tuple[Choice, Choice]] = {
    **DENSE_BACKWARD,
    64: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 64, 4, 2, "descriptors")),
    128: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 64, 4, 2, "descriptors")),
}
"""Like `DENSE_BACKWARD`, for causal masks and windows."""

LISTED_CHOICES: dict[tuple[str, bool, int], Choice] = {
    ("forward", True, 128): Choice(128, 128, 8, 2),
    ("to_queries", True, 128): Choice(128, 32, 8, 2),
    ("to_keys", True, 64): Choice(32, 128, 8, 2),
}
"""Replaces `CHOICES` for masks with block lists, whose bits take registers; for Triton 3.6 as measured on an H200,
where these took 0.69 to 0.92 of the time of larger ones under a prefix mask, and 0.61 to 0.86 under BigBird."""

if not NEWER:
    LISTED_CHOICES |= {
        ("forward", True, 128): Choice(64, 64, 4, 3),
        ("to_queries", True, 128): Choice(64, 64, 4, 2),
        ("to_keys", True, 128): Choice(64, 64, 4, 3),
    }

VARLEN_CHOICES: dict[tuple[str, bool, int], Choice] = {("to_keys", True, 128): Choice(64, 64, 8, 2)}
"""Replaces `CHOICES` where texts are packed."""

BIASED_CHOICES: dict[tuple[str, bool, int], Choice] = {
    ("forward", True, 64): Choice(128, 64, 8, 2),
    ("forward", True, 128): Choice(128, 32, 8, 2),
    ("to_queries", True, 128): Choice(128, 32, 8, 2),
    ("to_keys", True, 128): Choice(32, 64, 4, 2),
}
"""Replaces `CHOICES` where biases are learned."""

LISTED_BIASED_CHOICES: dict[tuple[str, bool, int], Choice] = {("forward", True, 128): Choice(128, 32, 8, 1)}
"""Replaces `CHOICES` for masks with block lists and learned biases."""

DROPPED_CHOICES: dict[tuple[str, bool, int], Choice] = {
    ("forward", True, 64): Choice(64, 32, 8, 2),
    ("forward", True, 128): Choice(64, 32, 8, 2),
    ("to_keys", True, 64): Choice(32, 32, 4, 2),
    ("to_queries", True, 128): Choice(64, 32, 4, 2) if NEWER else Choice(64, 32, 8, 2),
    ("to_keys", True, 128): Choice(32, 32, 4, 2),
}
"""Replaces `CHOICES` for attention dropout, whose random words take registers."""

NARROWEST = 64


def choice_of(program: str, sizes: Sizes) -> Choice:
    """The default launch parameters of a kernel, with tiles no larger than the operands or a block of the lists."""
    key = program, sizes.dtype.itemsize == 2, max(NARROWEST, sizes.width)
    chosen, queries, keys = CHOICES[key], power_of_two(sizes.queries), power_of_two(sizes.keys)
    for applies, others in (
        (sizes.block is not None, LISTED_CHOICES),
        (sizes.varlen, VARLEN_CHOICES),
        (sizes.biased, BIASED_CHOICES),
        (sizes.block is not None and sizes.biased, LISTED_BIASED_CHOICES),
        (sizes.dropped, DROPPED_CHOICES),
    ):
        # Later features need more registers, so they take precedence.
        chosen = others.get(key, chosen) if applies else chosen
    if sizes.block is not None:
        # A tile must not span several blocks: the kernel would apply the entry of the first one to all of it.
        queries, keys = min(queries, sizes.block), min(keys, sizes.block)
    return chosen._replace(queries=min(chosen.queries, queries), keys=min(chosen.keys, keys))


def dense_choice(sizes: Sizes, measured: Choice | None = None, *, pairs: bool = False) -> Choice:
    """The measured, else the default launch parameters of the forward kernel with TMA, with tiles no larger than the
    operands.

    A paired kernel is taken only if the device supports it (`pairs`) and its tiles need not be reduced.
    """
    shipped = DENSE_CHOICES[max(NARROWEST, sizes.width)]
    fitting = no_larger(measured or shipped, sizes)
    if fitting.schedule != "paired" or (pairs and fitting == measured):
        return fitting
    return no_larger(shipped, sizes)


def no_larger(choice: Choice, sizes: Sizes) -> Choice:
    """The launch parameters with tiles no larger than the operands."""
    queries, keys = min(choice.queries, power_of_two(sizes.queries)), min(choice.keys, power_of_two(sizes.keys))
    return choice._replace(queries=queries, keys=keys)


def tile_of(choice: Choice, sizes: Sizes) -> Tile:
    """The compile-time constants of a kernel: its tile and the head sizes."""
    constants = (
        choice.queries,
        choice.keys,
        sizes.key_size,
        sizes.value_size,
        power_of_two(sizes.key_size),
        power_of_two(sizes.value_size),
    )
    return Tile(*map(tl.constexpr, constants))
