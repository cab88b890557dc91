"""Changes to the scores before the distribution, and to what is summed, as data."""

from attn_core.modifier.base import Alibi, Modifier, ScoreFunction, SoftCap
from attn_core.modifier.dependency import DependencyKeys, DependencyTree, DependencyValues
from attn_core.modifier.relative import BiasTable, RelativeBias, RelativeKeys, RelativeValues, T5Bias

__all__ = [
    "Alibi",
    "BiasTable",
    "DependencyKeys",
    "DependencyTree",
    "DependencyValues",
    "Modifier",
    "RelativeBias",
    "RelativeKeys",
    "RelativeValues",
    "ScoreFunction",
    "SoftCap",
    "T5Bias",
]
