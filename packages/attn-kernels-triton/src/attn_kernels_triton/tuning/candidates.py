"""The few candidates among which a program may be tuned: none spills on sm_90a, as a test sees to."""

from __future__ import annotations

from typing import NamedTuple

from attn_kernels_triton.attention.tiles import (
    DENSE_APART,
    DENSE_APART_BOUNDED,
    DENSE_BACKWARD,
    NARROWEST,
    NEWER,
    Choice,
    Sizes,
)
from attn_kernels_triton.kernels.arguments import Rule
from attn_kernels_triton.paged.tiles import FEW, PAGED_CHOICES, PagedChoice
from attn_kernels_triton.recurrence.tiles import NARROWEST as NARROWEST_KEYS
from attn_kernels_triton.recurrence.tiles import SCAN_CHOICES, ScanChoice

Candidate = tuple[object, ...]
"""A choice, or the choices of programs that are measured together."""

PAIRED: dict[int, tuple[Choice, ...]] = {
    64: (Choice(128, 64, 4, 4, "paired"),),
    128: (Choice(128, 128, 4, 2, "paired"), Choice(128, 64, 4, 4, "paired")),
    256: (),
}
"""Those of Gluon, which is there with one version of Triton."""

CANDIDATES: dict[int, tuple[Choice, ...]] = {
    width: (*found, *(() if NEWER else PAIRED[width]))
    for width, found in {
        64: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 64, 4, 3, "descriptors")),
        128: (Choice(128, 128, 8, 3, "descriptors"), Choice(64, 64, 4, 3, "descriptors")),
        256: (Choice(128, 64, 8, 2, "descriptors"), Choice(128, 32, 8, 3, "descriptors")),
    }.items()
}
"""Of the forward pass of a band, by width. The first of each is what is shipped, here and below: what an H200 measured
as the fastest, or follows what it did."""

BACKWARD: dict[int, tuple[tuple[Choice, ...], ...]] = {
    64: (
        DENSE_APART[64],
        DENSE_BACKWARD[64],
        (Choice(128, 128, 8, 3, "descriptors"), Choice(64, 64, 4, 3, "descriptors")),
    ),
    128: (DENSE_APART[128], DENSE_BACKWARD[128], DENSE_APART_BOUNDED[128]),
}
"""Of its backward pass, by width: one program for queries and one for keys, or one for all gradients."""

PAGED: dict[int, tuple[PagedChoice, ...]] = {
    width: (first, first._replace(times=4), other)
    for width, other in (
        (64, PagedChoice(128, 4, 2, times=2)),
        (128, PagedChoice(128, 8, 3, times=2)),
        (256, PagedChoice(64, 8, 2, times=2)),
        (512, PagedChoice(64, 8, 2, times=8)),
    )
    for first in (PAGED_CHOICES[FEW, True, width],)
}
"""Of programs that decode over pages in 16 bits, by width."""

RECURRENCES: dict[tuple[str, bool], tuple[ScanChoice, ...]] = {
    (program, channels): (SCAN_CHOICES[program, True, channels, NARROWEST_KEYS], *others)
    for channels in (False, True)
    for program, others in {
        "remember": (ScanChoice(64, 32, 4, 2), ScanChoice(64, 32, 4, 3)),
        "recall": (ScanChoice(64, 64, 8 if channels else 4, 2),),
        "unrecall": (ScanChoice(64, 64, 8 if channels else 4, 2),),
        "unremember": (ScanChoice(64, 64, 8, 2),),
    }.items()
}
"""Of programs over chunks in 16 bits, by name and whether channels fade apart, which takes registers."""

LONG = 4096
"""Keys from which on a call is of the long ones."""
BOUNDS = ("full", "causal", "window")


class Kind(NamedTuple):
    """A class of calls that are tuned together: the width, what the band is bounded by, and whether keys are many."""

    width: int
    bounds: str
    long: bool

    @property
    def name(self) -> str:
        """What its forward pass is called in a file."""
        return f"{self.width} {self.bounds} {'long' if self.long else 'short'}"

    @property
    def backward(self) -> str:
        """What its backward pass is called."""
        return f"backward {self.name}"


def kind_of(sizes: Sizes, rule: Rule) -> Kind:
    """The class of a call."""
    bounds = "window" if rule.left is not None else "full" if rule.right is None else "causal"
    return Kind(max(NARROWEST, sizes.width), bounds, sizes.keys >= LONG)


def paged_name(width: int) -> str:
    """What decoding over heads of this width is called."""
    return f"decode {width}"


def recurrence_name(program: str, *, channels: bool) -> str:
    """What a program over chunks is called."""
    return f"{program} {'channels' if channels else 'heads'}"


def every() -> dict[str, tuple[Candidate, ...]]:
    """The candidates of every kind, by its name."""
    found: dict[str, tuple[Candidate, ...]] = {}
    for bounds in BOUNDS:
        for long in (False, True):
            found |= {Kind(width, bounds, long).name: some for width, some in CANDIDATES.items()}
            found |= {Kind(width, bounds, long).backward: some for width, some in BACKWARD.items()}
    found |= {paged_name(width): some for width, some in PAGED.items()}
    return found | {recurrence_name(name, channels=apart): some for (name, apart), some in RECURRENCES.items()}
