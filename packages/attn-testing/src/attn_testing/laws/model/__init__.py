"""Laws of language models, one a file."""

from __future__ import annotations

from attn_testing.law import Law
from attn_testing.laws.model.causality import Causality
from attn_testing.laws.model.crowd_equals_alone import CrowdEqualsAlone
from attn_testing.laws.model.described import Described
from attn_testing.laws.model.greedy_tokens_of_logits import GreedyTokensOfLogits
from attn_testing.laws.model.saved_and_loaded import SavedAndLoaded
from attn_testing.laws.model.step_equals_forward import StepEqualsForward

MODEL_LAWS: tuple[type[Law], ...] = (
    Described,
    Causality,
    StepEqualsForward,
    CrowdEqualsAlone,
    GreedyTokensOfLogits,
    SavedAndLoaded,
)

__all__ = [
    "MODEL_LAWS",
    "Causality",
    "CrowdEqualsAlone",
    "Described",
    "GreedyTokensOfLogits",
    "SavedAndLoaded",
    "StepEqualsForward",
]
