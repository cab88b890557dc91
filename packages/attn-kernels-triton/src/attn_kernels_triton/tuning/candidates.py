"""The few choices among which a forward program may be tuned: none spills on sm_90a, as a test sees to."""

from __future__ import annotations

from typing import NamedTuple

from attn_kernels_triton.attention.tiles import NARROWEST, Choice, Sizes
from attn_kernels_triton.programs.arguments import Rule

CANDIDATES: dict[int, tuple[Choice, ...]] = {
    64: (Choice(128, 128, 8, 2, "descriptors"), Choice(128, 128, 4, 2, "specialised")),
    128: (
        Choice(128, 128, 8, 2, "descriptors"),
        Choice(128, 64, 8, 3, "descriptors"),
        Choice(128, 128, 4, 2, "specialised"),
        Choice(128, 64, 4, 3, "specialised"),
    ),
    256: (Choice(128, 64, 8, 2, "descriptors"), Choice(128, 64, 4, 2, "specialised")),
}
"""By width. The first of each is what is shipped: so far on the word of the compiler alone, for no H200 measured it."""

LONG = 4096
"""Keys from which on a call is of the long ones."""


class Kind(NamedTuple):
    """A class of calls that are tuned together: the width, what the band is bounded by, and whether keys are many."""

    width: int
    bounds: str
    long: bool

    @property
    def name(self) -> str:
        """What it is called in a file."""
        return f"{self.width} {self.bounds} {'long' if self.long else 'short'}"


def kind_of(sizes: Sizes, rule: Rule) -> Kind:
    """The class of a call."""
    bounds = "window" if rule.left is not None else "full" if rule.right is None else "causal"
    return Kind(max(NARROWEST, sizes.width), bounds, sizes.keys >= LONG)
