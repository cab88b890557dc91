"""What sparse mechanisms share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_core import Capability, MechanismConfig
from attn_core.errors import Incompatible, InvalidValue

from attn_variants.mechanisms.capabilities import GROUPED_SELF

DECODER = GROUPED_SELF - {Capability.BIDIRECTIONAL}
"""Of patterns that only look back."""

ENCODER = GROUPED_SELF - {Capability.CAUSAL, Capability.INCREMENTAL, Capability.BORROWS}
"""Of patterns that have no causal form."""

PATTERNS = ("union", "heads", "local", "column")
"""How the two patterns of the Sparse Transformer are put together: both in every head, even heads one and odd heads the
other, or one alone, for models that alternate them from layer to layer."""


def check_pattern(pattern: object) -> None:
    """Raise `InvalidValue` unless the pattern is one of `PATTERNS`."""
    if pattern not in PATTERNS:
        raise InvalidValue.of("pattern", pattern, ", ".join(PATTERNS))


def check_least(field: str, value: object, least: int) -> None:
    """Raise `InvalidValue` unless the value is a whole number from `least`."""
    if not is_whole(value, least):
        raise InvalidValue.of(field, value, f"a whole number from {least}")


def whole_numbers(field: str, values: object, least: int) -> tuple[int, ...]:
    """A sequence of whole numbers from `least` as a tuple; raises `InvalidValue` for anything else."""
    if isinstance(values, Sequence) and not isinstance(values, str) and all(is_whole(one, least) for one in values):
        return tuple(values)
    raise InvalidValue.of(field, values, f"a list of whole numbers from {least}")


def is_whole(value: Any, least: int) -> bool:
    """Whether the value is a whole number from `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def only_causal(name: str, config: MechanismConfig) -> None:
    """Raise `Incompatible` where a mechanism that only looks back is asked to look ahead."""
    if not config.causal:
        raise Incompatible(f"mechanism {name!r} only looks back: configure it with causal=True", mechanism=name)


def never_causal(name: str, config: MechanismConfig) -> None:
    """Raise `Incompatible` where a mechanism without a causal form is asked to be causal."""
    if config.causal:
        message = f"mechanism {name!r} has no causal form, it is for encoders: configure it with causal=False"
        raise Incompatible(message, mechanism=name)
