"""Mechanisms that meet less than every row with every other: latents, low ranks, hashes, clusters and graphs."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.latent.mla import MultiHeadLatentAttention
from attn_variants.mechanisms.latent.transmla import FactorisedAttention


def reduced() -> list[Mechanism]:
    """One of each."""
    return [
        MultiHeadLatentAttention(),
        FactorisedAttention(),
    ]
