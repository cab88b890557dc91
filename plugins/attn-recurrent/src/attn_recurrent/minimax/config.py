"""The config of a MiniMax-01 decoder."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.checks import require_number
from attn_schema.decoder import DecoderConfig

LIGHTNING = "attn-variants/lightning"
FACTORS = tuple(
    f"{part}_{factor}_factor" for part in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")
)


@dataclass(frozen=True, kw_only=True)
class MiniMaxConfig(DecoderConfig):
    """A decoder whose sublayers give α x + β F(x), x being the normed hidden state that F reads.

    The factors are those of layers with softmax and with lightning attention, and of feed-forwards.
    """

    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in FACTORS:
            require_number(name, getattr(self, name), ge=0)

    def attention_factors(self, mechanism: str) -> tuple[float, float]:
        """α and β of a layer with this mechanism, given by its full name."""
        if mechanism == LIGHTNING:
            return self.linear_attn_alpha_factor, self.linear_attn_beta_factor
        return self.full_attn_alpha_factor, self.full_attn_beta_factor
