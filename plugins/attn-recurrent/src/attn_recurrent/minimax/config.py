"""The config of a MiniMax-01 decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from attn_schema.decoder import DecoderConfig
from msgspec import Meta

Factor = Annotated[float, Meta(ge=0)]
LIGHTNING = "attn-variants/lightning"


@dataclass(frozen=True, kw_only=True)
class MiniMaxConfig(DecoderConfig):
    """A decoder whose sublayers give α x + β F(x), x being the normed hidden state that F reads.

    The factors are those of layers with linear and with softmax attention, and of feed-forwards.
    """

    full_attn_alpha_factor: Factor = 1.0
    full_attn_beta_factor: Factor = 1.0
    linear_attn_alpha_factor: Factor = 1.0
    linear_attn_beta_factor: Factor = 1.0
    mlp_alpha_factor: Factor = 1.0
    mlp_beta_factor: Factor = 1.0
