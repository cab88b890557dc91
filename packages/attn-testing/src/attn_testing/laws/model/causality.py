"""A language model does not see what it is to predict."""

from __future__ import annotations

import torch

from attn_testing.expect import require, require_same
from attn_testing.law import Law
from attn_testing.model_subject import ModelCase


class Causality(Law):
    """Changing later tokens changes no earlier logits, and changing a token changes its own."""

    def test_later_tokens_change_no_earlier_logits(self, case: ModelCase) -> None:
        tokens = case.tokens(2, 9)
        with torch.no_grad():
            before = case.model(tokens)
            for first in (1, 4, 8):
                changed = tokens.clone()
                changed[:, first:] = (changed[:, first:] + 1) % case.model.vocabulary
                after = case.model(changed)
                require_same(after[:, :first], before[:, :first], f"logits before changed position {first}", 1e-10)
                moved = (after[:, first] - before[:, first]).abs().max().item()
                require(moved > 1e-6, f"another token at position {first} changes its logits by {moved:g} only")
