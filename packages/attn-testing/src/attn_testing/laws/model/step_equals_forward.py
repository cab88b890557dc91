"""A model served token by token says what it says at once."""

from __future__ import annotations

import torch

from attn_testing.expect import require_same
from attn_testing.law import Law
from attn_testing.model_subject import ModelCase, ModelServing

TOKENS = 12
SPLITS = ((12,), (1,) * 12, (5, 1, 1, 1, 1, 1, 1, 1), (3, 4, 1, 4))


class StepEqualsForward(Law):
    """Logits of steps, whole, single and in chunks, equal those of the full forward."""

    def test_steps_of_any_length_equal_the_full_forward(self, case: ModelCase) -> None:
        tokens = case.tokens(TOKENS)
        with torch.no_grad():
            full = case.model(tokens[None])[0]
        for split in SPLITS:
            serving = ModelServing(case.model)
            logits = torch.cat([serving.step({0: piece})[0] for piece in torch.split(tokens, list(split))])
            require_same(logits, full, f"logits of steps {split} and of the full forward", case.tolerance)
