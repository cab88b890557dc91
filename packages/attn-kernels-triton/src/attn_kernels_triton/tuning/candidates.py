"""The candidate launch parameters for tuning; none of them spills registers on sm_90a, which a test checks."""

from __future__ import annotations

from typing import NamedTuple

from attn_kernels_triton.attention.tiles import (
    DENSE_BACKWARD,
    DENSE_BACKWARD_BOUNDED,
    GLUON,
    NARROWEST,
    Choice,
    Sizes,
)
from attn_kernels_triton.kernels.arguments import Rule
from attn_kernels_triton.paged.tiles import PAGED_CHOICES, SMALL_TILE, PagedChoice
from attn_kernels_triton.recurrence.tiles import NARROWEST as NARROWEST_KEYS
from attn_kernels_triton.recurrence.tiles import SCAN_CHOICES, ScanChoice

Candidate = tuple[object, ...]
"""Launch parameters, or those of several kernels that are measured together."""

PAIRED = Choice(128, 128, 4, 2, "paired"), Choice(128, 64, 4, 4, "paired")
"""Candidates for the paired (Gluon) kernel, with Triton 3.6 only, at width 128: at 64 it was always the slower one."""

CANDIDATES: dict[int, tuple[Choice, ...]] = {
    64: (Choice(128, 64, 8, 3, "descriptors"), Choice(64, 64, 4, 3, "descriptors")),
    128: (
        Choice(128, 128, 8, 3, "descriptors"),
        Choice(64, 64, 4, 3, "descriptors"),
        *(PAIRED if GLUON else ()),
    ),
    256: (Choice(128, 64, 8, 2, "descriptors"), Choice(128, 32, 8, 3, "descriptors")),
}
"""Candidates for the forward pass with a band mask, by width. The first of each, here and below, is the default: the
fastest as measured on an H200, or derived from such a measurement."""

BACKWARD: dict[int, tuple[tuple[Choice, ...], ...]] = {
    64: (
        DENSE_BACKWARD[64],
        (Choice(128, 128, 8, 3, "descriptors"), Choice(64, 64, 4, 3, "descriptors")),
    ),
    128: (DENSE_BACKWARD[128], DENSE_BACKWARD_BOUNDED[128]),
}
"""Candidates for its backward pass, by width: of the kernel that owns queries, and of the one that owns keys."""

PAGED: dict[int, tuple[PagedChoice, ...]] = {
    width: (first, first._replace(times=4), other)
    for width, other in (
        (64, PagedChoice(128, 4, 2, times=2)),
        (128, PagedChoice(128, 8, 3, times=2)),
        (256, PagedChoice(64, 8, 2, times=2)),
        (512, PagedChoice(64, 8, 2, times=8)),
    )
    for first in (PAGED_CHOICES[SMALL_TILE, True, width],)
}
"""Candidates for decoding over a paged cache in 16 bits, by width."""

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
"""Candidates for the chunked recurrence kernels in 16 bits, by kernel and whether decays are per channel, which takes
more registers."""

LONG = 4096
"""The number of keys from which on a call counts as long."""
BOUNDS = ("full", "causal", "window")


class Kind(NamedTuple):
    """A class of calls that share a tuning result: the head width, the bounds of the band, and whether it is long."""

    width: int
    bounds: str
    long: bool

    @property
    def name(self) -> str:
        """The name of the forward pass in the tuning file."""
        return f"{self.width} {self.bounds} {'long' if self.long else 'short'}"

    @property
    def backward(self) -> str:
        """The name of the backward pass in the tuning file."""
        return f"backward {self.name}"


def kind_of(sizes: Sizes, rule: Rule) -> Kind:
    """The tuning class of a call."""
    bounds = "window" if rule.left is not None else "full" if rule.right is None else "causal"
    return Kind(max(NARROWEST, sizes.width), bounds, sizes.keys >= LONG)


def paged_name(width: int) -> str:
    """The name of decoding with heads of this width in the tuning file."""
    return f"decode {width}"


def recurrence_name(program: str, *, channels: bool) -> str:
    """The name of a chunked recurrence kernel in the tuning file."""
    return f"{program} {'channels' if channels else 'heads'}"


def every() -> dict[str, tuple[Candidate, ...]]:
    """The candidates of every kind of call, by the name of the kind."""
    found: dict[str, tuple[Candidate, ...]] = {}
    for bounds in BOUNDS:
        for long in (False, True):
            found |= {Kind(width, bounds, long).name: some for width, some in CANDIDATES.items()}
            found |= {Kind(width, bounds, long).backward: some for width, some in BACKWARD.items()}
    found |= {paged_name(width): some for width, some in PAGED.items()}
    return found | {recurrence_name(name, channels=apart): some for (name, apart), some in RECURRENCES.items()}
