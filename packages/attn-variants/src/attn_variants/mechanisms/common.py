"""Shared parts of mechanism declarations, without torch: capabilities, masks, checks of options, cost terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attn_core import AttentionSpec, Capability, Causal, Full, Heads, Mask, MechanismConfig, Window
from attn_core.checks import checked, is_whole, require_whole
from attn_core.errors import InvalidValue

BASIC = frozenset({Capability.BIAS, Capability.HEAD_DIM})
"""The capabilities of all mechanisms that project their inputs to heads."""

SELF = BASIC | frozenset(
    {
        Capability.CAUSAL,
        Capability.BIDIRECTIONAL,
        Capability.INCREMENTAL,
        Capability.EXACT,
        Capability.WEIGHTS,
        Capability.NORMALISED,
        Capability.PADDING,
        Capability.ROTARY,
        Capability.SHARES_KV,
    }
)
"""The capabilities of every declared self-attention."""

GROUPED_SELF = SELF | {Capability.GROUPED}
"""The capabilities of self-attention that also supports grouped key/value heads."""

CROSS = GROUPED_SELF - {
    Capability.CAUSAL,
    Capability.BIDIRECTIONAL,
    Capability.ROTARY,
    Capability.SHARES_KV,
} | {Capability.CROSS}
"""The capabilities of every declared pure cross-attention."""

UNNORMALISED = GROUPED_SELF - {Capability.NORMALISED}
"""The capabilities of self-attention whose weights need not sum to one."""

CHOOSING = GROUPED_SELF | {Capability.CHOOSES}
"""The capabilities of self-attention that puts all weight on the few keys with the highest scores."""


@dataclass(frozen=True, kw_only=True)
class ValueSizeConfig(MechanismConfig):
    """`value_size` is the size of the values of a head, `head_dim` by default."""

    value_size: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)


def heads_of(config: MechanismConfig) -> Heads:
    """The heads of a config, with the value size of a `ValueSizeConfig`."""
    size = config.value_size if isinstance(config, ValueSizeConfig) else None
    return config.head_layout if size is None else dataclasses.replace(config.head_layout, value_size=size)


def self_mask(config: MechanismConfig) -> Mask:
    """`Causal()` if the config is causal self-attention, else `Full()`."""
    return Causal() if config.causal and not config.cross else Full()


def window_mask(config: MechanismConfig, window: int | None) -> Mask:
    """A mask of the `window` nearest tokens; that of `self_mask` for None.

    If causal, the query's own token and those before it, else half of them on either side.
    """
    if window is None:
        return self_mask(config)
    return Window(left=window - 1) if config.causal else Window(left=window // 2, right=window // 2)


def self_attention(config: MechanismConfig, **parts: Any) -> AttentionSpec:
    """The attention spec with the heads, mask and rotary embedding of a config; `parts` override or add fields.

    Raises `InvalidValue` unless the key/value heads divide the heads.
    """
    usual: dict[str, Any] = {"mask": self_mask(config), "rotary": config.rotary, "cross": config.cross}
    if "heads" not in parts:
        usual["heads"] = heads_of(config)
    return AttentionSpec(**usual | parts)


def projection_weights(config: MechanismConfig, heads: Heads) -> int:
    """The number of elements of the query, key, value and output matrices; each takes two FLOPs per token."""
    return config.hidden_size * (channels_of(heads) + heads.query * heads.value_size)


def projection_biases(config: MechanismConfig, heads: Heads) -> int:
    """The number of elements of the biases of the same projections, 0 without `bias`."""
    return channels_of(heads) + config.hidden_size if config.bias else 0


def channels_of(heads: Heads) -> int:
    """The number of elements of the query, key and value of one token of a recurrence, over all heads; as many queries
    as keys have `key_value` heads."""
    return 2 * heads.key_value * heads.key_size + heads.query * heads.value_size


DECODER = GROUPED_SELF - {Capability.BIDIRECTIONAL}
"""The capabilities of sparse patterns that are always causal."""

ENCODER = GROUPED_SELF - {Capability.CAUSAL, Capability.INCREMENTAL, Capability.SHARES_KV}
"""The capabilities of sparse patterns that have no causal form."""

PATTERNS = ("union", "heads", "local", "column")
"""The combinations of the two Sparse Transformer patterns: both in every head ("union"), one in even and the other in
odd heads ("heads"), or only one of them, for models that alternate them between layers."""


def whole_numbers(field: str, values: object, least: int = 0) -> tuple[int, ...]:
    """A list of whole numbers from `least`, as a tuple of ints; raises `InvalidValue` for anything else."""
    entries = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (None,)
    # Whole numbers from JSON or from protobuf's Struct may be floats.
    whole = [int(one) if isinstance(one, float) and one.is_integer() else one for one in entries]
    if not all(is_whole(one) and one >= least for one in whole):
        raise InvalidValue.of(field, values, f"a list of whole numbers from {least}")
    return tuple(whole)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When rows leave a cache: after every `interval` tokens, all but `budget` of them for each key/value head.

    The last `window` queries before that vote by their weights, and their keys stay. The votes for other keys are
    averaged over `pool` neighbours. With `together`, all heads vote for the same rows.
    """

    budget: int
    interval: int = 1
    window: int = 1
    pool: int = 1
    together: bool = False

    @property
    def rows(self) -> int:
        """The most rows that are kept."""
        return self.budget + self.interval

    def filled(self, tokens: int) -> int:
        """The number of rows that are kept of that many tokens."""
        first = (self.budget // self.interval + 1) * self.interval
        return tokens if tokens < first else self.budget + tokens % self.interval

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split the tokens from `start` to `stop` where rows leave: the start and the end of each piece."""
        for border in range(start // self.interval * self.interval, stop, self.interval):
            yield max(start, border), min(stop, border + self.interval)
