"""Capabilities that mechanisms of the softmax family share."""

from __future__ import annotations

from attn_core import Capability

SELF = frozenset(
    {
        Capability.CAUSAL,
        Capability.BIDIRECTIONAL,
        Capability.INCREMENTAL,
        Capability.EXACT,
        Capability.WEIGHTS,
        Capability.NORMALISED,
        Capability.PADDING,
        Capability.ROTARY,
        Capability.BORROWS,
    }
)
"""Of every declared self-attention."""

GROUPED_SELF = SELF | {Capability.GROUPED}
"""Of those that also share keys and values between heads."""

UNNORMALISED = GROUPED_SELF - {Capability.NORMALISED}
"""Of those whose weights need not sum to one."""

CHOOSING = GROUPED_SELF | {Capability.CHOOSES}
"""Of those that put all weight on few keys, whichever score highest."""
