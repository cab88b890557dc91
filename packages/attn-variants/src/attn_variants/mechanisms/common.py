"""What declarations of mechanisms share: capabilities, masks, checks of options, cost terms (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_core import AttentionSpec, Capability, Causal, Full, Heads, Mask, MechanismConfig, Window
from attn_core.checks import is_whole
from attn_core.errors import InvalidValue

BASIC = frozenset({Capability.BIAS, Capability.HEAD_DIM})
"""Of everything that projects its inputs to heads."""

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
"""Of every declared self-attention."""

GROUPED_SELF = SELF | {Capability.GROUPED}
"""Of those that also share keys and values between heads."""

CROSS = GROUPED_SELF - {
    Capability.CAUSAL,
    Capability.BIDIRECTIONAL,
    Capability.ROTARY,
    Capability.SHARES_KV,
} | {Capability.CROSS}
"""Of every declared attention to a source alone."""

UNNORMALISED = GROUPED_SELF - {Capability.NORMALISED}
"""Of those whose weights need not sum to one."""

CHOOSING = GROUPED_SELF | {Capability.CHOOSES}
"""Of those that put all weight on few keys, whichever score highest."""


def self_mask(config: MechanismConfig) -> Mask:
    """Causal where the model is, else full, as over a source."""
    return Causal() if config.causal and not config.cross else Full()


def window_mask(config: MechanismConfig, window: int | None) -> Mask:
    """The `window` nearest tokens: causal, the query's own and those before it, else half of them on either side;
    all where it is None."""
    if window is None:
        return self_mask(config)
    return Window(left=window - 1) if config.causal else Window(left=window // 2, right=window // 2)


def self_attention(config: MechanismConfig, **parts: Any) -> AttentionSpec:
    """The spec at the sizes, mode and rotary positions of a config; `parts` are what differs.

    Raises `InvalidValue` where the key/value heads do not divide the heads.
    """
    usual: dict[str, Any] = {"heads": config.head_layout, "mask": self_mask(config), "rotary": config.rotary}
    return AttentionSpec(**usual | {"cross": config.cross} | parts)


def projection_weights(config: MechanismConfig, heads: Heads) -> int:
    """Elements of the weight matrices of the query, key, value and output projections; two FLOPs each per token."""
    return config.hidden_size * 2 * heads.query * (heads.key_size + heads.value_size)


def projection_biases(config: MechanismConfig, heads: Heads) -> int:
    """Elements of the biases of these projections, 0 without `bias`."""
    return heads.query * (2 * heads.key_size + heads.value_size) + config.hidden_size if config.bias else 0


DECODER = GROUPED_SELF - {Capability.BIDIRECTIONAL}
"""Of patterns that only look back."""

ENCODER = GROUPED_SELF - {Capability.CAUSAL, Capability.INCREMENTAL, Capability.SHARES_KV}
"""Of patterns that have no causal form."""

PATTERNS = ("union", "heads", "local", "column")
"""How the two patterns of the Sparse Transformer are put together: both in every head, even heads one and odd heads the
other, or one alone, for models that alternate them from layer to layer."""


def whole_numbers(field: str, values: object, least: int = 0) -> tuple[int, ...]:
    """A list of whole numbers from `least`, as a tuple of ints; raises `InvalidValue` for anything else."""
    entries = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (None,)
    # Numbers of JSON and of protobuf's Struct may be floats.
    whole = [int(one) if isinstance(one, float) and one.is_integer() else one for one in entries]
    if not all(is_whole(one) and one >= least for one in whole):
        raise InvalidValue.of(field, values, f"a list of whole numbers from {least}")
    return tuple(whole)
