"""How much a program takes at once, for each kind of program, type and width."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Tile
from attn_kernels_triton.launch import power_of_two

Schedule = Literal["pointers", "descriptors", "paired", "joined"]
"""How a program reads: each thread its own; tiles fetched by the chip's copier; the same, by a warp that does nothing
else, for two groups of warps of the forward program; the same, by one backward program that computes all gradients."""


NEWER = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)
"""Whether this is not the oldest Triton that is admitted, which gives registers to programs in another way."""


class Choice(NamedTuple):
    """Queries and keys of a tile, warps, stages of the pipeline that loads ahead, and which program it is for.

    That is a `Schedule`; programs over biases have "pointers" alone.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    schedule: Schedule = "pointers"


class Sizes(NamedTuple):
    """Of what kind the operands of a program are: element type, sizes of keys and values, queries and keys.

    `block` is the side of the blocks that lists name, None where a program walks without lists; `varlen`, `biased` and
    `dropped` say that rows hold several texts, that biases are learned, and that weights are dropped.
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
        """The wider of keys and values, as a power of two."""
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
"""By the program, whether elements have 16 bits, and the width; none of these spills on sm_90a, as a test sees to."""

DENSE_CHOICES: dict[int, Choice] = {
    64: Choice(128, 64, 8, 3, "descriptors"),
    128: Choice(128, 128, 8, 3, "descriptors"),
    256: Choice(128, 64, 8, 2, "descriptors"),
}
"""For forward programs of bands over elements of 16 bits, by width, where the chip copies tiles by itself.

Two stages hold one tile, which is fetched while nothing is computed. On an H200 three took 0.86 of the time at width
128, 581 TFLOP/s over 8192 full and 568 causal, 0.85 and 0.93 of cuDNN; at width 64 0.98 and 0.94.
"""

PAIRED_CHOICES: dict[int, Choice] = {128: Choice(128, 128, 4, 2, "paired")}
"""The same where paired programs run, full and causal, over whole tiles: on an H200 692 TFLOP/s over 8192 full and 642
causal, 1.01 and 1.05 of cuDNN. At width 64 they were slower than the others."""

DENSE_BACKWARD: dict[int, tuple[Choice, ...]] = {
    64: (Choice(64, 128, 8, 3, "joined"),),
    128: (Choice(64, 128, 8, 2, "joined"),),
}
"""The same for backward programs that join all gradients, where they are taken."""

DENSE_APART: dict[int, tuple[Choice, Choice]] = {
    64: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 64, 4, 3, "descriptors")),
    128: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 128, 8, 3, "descriptors")),
}
"""Those that own queries and those that own keys, which are shipped: on an H200 both together took 0.86 of the time of
the joined one over 4096 full and 0.7 causal, at width 128; at width 64 that which owns keys took 0.67 of the time of
tiles of 64 by 128, over 8192."""

DENSE_APART_BOUNDED: dict[int, tuple[Choice, Choice]] = {
    **DENSE_APART,
    64: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 64, 4, 2, "descriptors")),
    128: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 64, 4, 2, "descriptors")),
}
"""The same under causal masks and windows."""

LISTED_CHOICES: dict[tuple[str, bool, int], Choice] = {
    ("forward", True, 128): Choice(128, 128, 8, 2),
    ("to_queries", True, 128): Choice(128, 32, 8, 2),
    ("to_keys", True, 64): Choice(32, 128, 8, 2),
}
"""In place of the above where blocks are listed, whose bits need registers of their own; for Triton 3.6 as measured on
an H200, where these took 0.69 to 0.92 of the time of larger ones under a prefix, and 0.61 to 0.86 under BigBird."""

if not NEWER:
    LISTED_CHOICES |= {
        ("forward", True, 128): Choice(64, 64, 4, 3),
        ("to_queries", True, 128): Choice(64, 64, 4, 2),
        ("to_keys", True, 128): Choice(64, 64, 4, 3),
    }

VARLEN_CHOICES: dict[tuple[str, bool, int], Choice] = {("to_keys", True, 128): Choice(64, 64, 8, 2)}
"""The same where texts are packed."""

BIASED_CHOICES: dict[tuple[str, bool, int], Choice] = {
    ("forward", True, 64): Choice(128, 64, 8, 2),
    ("forward", True, 128): Choice(128, 32, 8, 2),
    ("to_queries", True, 128): Choice(128, 32, 8, 2),
    ("to_keys", True, 128): Choice(32, 64, 4, 2),
}
"""The same where biases are learned."""

LISTED_BIASED_CHOICES: dict[tuple[str, bool, int], Choice] = {("forward", True, 128): Choice(128, 32, 8, 1)}
"""The same where both are."""

DROPPED_CHOICES: dict[tuple[str, bool, int], Choice] = {
    ("forward", True, 64): Choice(64, 32, 8, 2),
    ("forward", True, 128): Choice(64, 32, 8, 2),
    ("to_keys", True, 64): Choice(32, 32, 4, 2),
    ("to_queries", True, 128): Choice(64, 32, 4, 2) if NEWER else Choice(64, 32, 8, 2),
    ("to_keys", True, 128): Choice(32, 32, 4, 2),
}
"""The same where weights are dropped, whose words are counted in registers."""

NARROWEST = 64


def choice_of(program: str, sizes: Sizes) -> Choice:
    """What is shipped for a program, never larger than the operands, nor than a block that a list names."""
    key = program, sizes.dtype.itemsize == 2, max(NARROWEST, sizes.width)
    chosen, queries, keys = CHOICES[key], power_of_two(sizes.queries), power_of_two(sizes.keys)
    for applies, others in (
        (sizes.block is not None, LISTED_CHOICES),
        (sizes.varlen, VARLEN_CHOICES),
        (sizes.biased, BIASED_CHOICES),
        (sizes.block is not None and sizes.biased, LISTED_BIASED_CHOICES),
        (sizes.dropped, DROPPED_CHOICES),
    ):
        # What comes later needs more registers.
        chosen = others.get(key, chosen) if applies else chosen
    if sizes.block is not None:
        # A tile over several blocks would meet what the list says of the first of them alone.
        queries, keys = min(queries, sizes.block), min(keys, sizes.block)
    return chosen._replace(queries=min(chosen.queries, queries), keys=min(chosen.keys, keys))


def dense_choice(sizes: Sizes, measured: Choice | None = None, *, pairs: bool = False) -> Choice:
    """What was measured, else what is shipped, where the chip copies tiles; never larger than the operands.

    Only where it `pairs` is a program that does so taken, and only for whole tiles.
    """
    shipped = DENSE_CHOICES[max(NARROWEST, sizes.width)]
    fitting = no_larger(measured or shipped, sizes)
    if fitting.schedule != "paired" or (pairs and fitting == measured):
        return fitting
    return no_larger(shipped, sizes)


def no_larger(choice: Choice, sizes: Sizes) -> Choice:
    """The choice with tiles no larger than the operands."""
    queries, keys = min(choice.queries, power_of_two(sizes.queries)), min(choice.keys, power_of_two(sizes.keys))
    return choice._replace(queries=queries, keys=keys)


def tile_of(choice: Choice, sizes: Sizes) -> Tile:
    """The constants of a program."""
    constants = (
        choice.queries,
        choice.keys,
        sizes.key_size,
        sizes.value_size,
        power_of_two(sizes.key_size),
        power_of_two(sizes.value_size),
    )
    return Tile(*map(tl.constexpr, constants))
