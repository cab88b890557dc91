"""The mechanisms of this folder."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.positions.dependency import DependencyAttention
from attn_variants.mechanisms.positions.dependency_depth import DependencyDepthAttention
from attn_variants.mechanisms.positions.nope import NoPositions
from attn_variants.mechanisms.positions.path import PathAttention
from attn_variants.mechanisms.positions.placed import AddedPositions, ConcatenatedPositions
from attn_variants.mechanisms.positions.qk_l2_norm import QkL2NormAttention
from attn_variants.mechanisms.positions.qk_norm import QkNormAttention
from attn_variants.mechanisms.positions.relative_bias import RelativeBiasAttention
from attn_variants.mechanisms.positions.shaw import ShawAttention
from attn_variants.mechanisms.positions.soft_cap import SoftCapAttention
from attn_variants.mechanisms.positions.t5 import T5Attention


def positions() -> list[Mechanism]:
    """One of each."""
    return [
        AddedPositions(),
        ConcatenatedPositions(),
        DependencyAttention(),
        DependencyDepthAttention(),
        NoPositions(),
        PathAttention(),
        QkL2NormAttention(),
        QkNormAttention(),
        RelativeBiasAttention(),
        ShawAttention(),
        SoftCapAttention(),
        T5Attention(),
    ]
