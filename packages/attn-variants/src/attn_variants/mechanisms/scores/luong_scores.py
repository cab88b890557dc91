"""What the attentions of Luong et al. share: cross-attention with a score by name."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import Capability, Heads, MechanismConfig, Paper
from attn_core.errors import Incompatible, InvalidValue
from attn_core.scores import Concat, Dot, General, Location, Score

from attn_variants.mechanisms.capabilities import GROUPED_SELF

LUONG = Paper(
    title="Effective Approaches to Attention-based Neural Machine Translation",
    authors="Luong et al.",
    year=2015,
    arxiv="1508.04025",
)
CAPABILITIES = GROUPED_SELF - {Capability.CAUSAL, Capability.ROTARY, Capability.BORROWS} | {Capability.CROSS}
WORDS = ("dot", "general", "concat", "location")
UNKNOWN = 1024
"""Longest source of location-based scores where the model names no context."""


@dataclass(frozen=True, kw_only=True)
class LuongConfig(MechanismConfig):
    """`score` is dot, general, concat or location."""

    score: str = "general"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score not in WORDS:
            raise InvalidValue.of("score", self.score, " or ".join(WORDS))


def score_of(config: MechanismConfig) -> Score:
    """The score that a config names."""
    word = LuongConfig.of(config).score
    if word == "location":
        return Location(longest=config.context or UNKNOWN)
    scores: dict[str, Score] = {"dot": Dot(), "general": General(), "concat": Concat()}
    return scores[word]


def cross_heads(config: MechanismConfig, name: str) -> Heads:
    """The heads; raises `Incompatible` where rotary positions are asked for: queries and source share no positions."""
    if config.rotary is not None:
        raise Incompatible(f"mechanism {name!r} takes no rotary positions: queries and source share none")
    return config.head_layout
