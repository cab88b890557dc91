"""The mask that a config asks for."""

from __future__ import annotations

from attn_core import Causal, Full, Mask, MechanismConfig


def self_mask(config: MechanismConfig) -> Mask:
    """Causal where the model is, else full."""
    return Causal() if config.causal else Full()
