"""The learned parameters of a score."""

from __future__ import annotations

from attn_core import Additive, General, Heads, Score
from torch import nn

from attn_variants.score.additive import AdditiveParameters
from attn_variants.score.general import GeneralParameters


def score_parameters(score: Score, heads: Heads) -> nn.Module | None:
    """A fresh module that holds the score's parameters by name; None where it has none."""
    if isinstance(score, Additive):
        return AdditiveParameters(score, heads)
    if isinstance(score, General):
        return GeneralParameters(heads)
    return None
