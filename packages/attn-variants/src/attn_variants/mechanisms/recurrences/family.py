"""The mechanisms of this folder."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.recurrences.deltanet import DeltaNet
from attn_variants.mechanisms.recurrences.efficient import EfficientAttention
from attn_variants.mechanisms.recurrences.gla import GatedLinearAttention
from attn_variants.mechanisms.recurrences.kda import KimiDeltaAttention
from attn_variants.mechanisms.recurrences.lightning import LightningAttention
from attn_variants.mechanisms.recurrences.performer import Performer
from attn_variants.mechanisms.recurrences.retnet import Retention


def recurrences() -> list[Mechanism]:
    """One of each."""
    return [
        Retention(),
        GatedLinearAttention(),
        DeltaNet(),
        KimiDeltaAttention(),
        LightningAttention(),
        Performer(),
        EfficientAttention(),
    ]
