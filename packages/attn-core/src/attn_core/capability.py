"""What a mechanism can do; laws of the conformance kit and models ask for these by name."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """One ability. A law applies where its capability is declared."""

    CAUSAL = "causal"
    """No output depends on a later input when configured causal."""
    BIDIRECTIONAL = "bidirectional"
    """Every output may depend on every input when configured not causal."""
    CROSS = "cross"
    """Queries attend to a source, not to their own sequence."""
    INCREMENTAL = "incremental"
    """Has its own `step`; without it the engine replays the full sequence."""
    EXACT = "exact"
    """Computes its equation exactly, without sampling or approximation."""
    WEIGHTS = "weights"
    """Returns attention weights on request."""
    NORMALISED = "normalised"
    """Weights are not negative and sum to one over the allowed keys."""
    PADDING = "padding"
    """Takes a mask of padded keys."""
    ROTARY = "rotary"
    """Takes rotary positions."""
    GROUPED = "grouped"
    """Takes fewer key/value heads than query heads."""
    CHOOSES = "chooses"
    """Picks among keys by comparing numbers, so that rounding may change some answers by more than its own size."""
    BORROWS = "borrows"
    """Attends to keys and values that another layer made, where it is configured to."""
