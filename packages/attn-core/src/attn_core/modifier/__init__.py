"""Changes to the scores before the distribution, and to what is summed, as data."""

from attn_core.modifier.base import Alibi, Modifier, ScoreFunction, SoftCap
from attn_core.modifier.relative import BiasTable, RelativeBias, RelativeKeys, RelativeValues, T5Bias

__all__ = [
    "Alibi",
    "BiasTable",
    "Modifier",
    "RelativeBias",
    "RelativeKeys",
    "RelativeValues",
    "ScoreFunction",
    "SoftCap",
    "T5Bias",
]
