"""A token that is found without logits is the one that logits show."""

from __future__ import annotations

import torch
from attn_core.models import GreedyHead

from attn_testing.expect import require
from attn_testing.law import Law
from attn_testing.model_subject import ModelCase, ModelServing

ROWS = 12


class GreedyTokensOfLogits(Law):
    """Where a model finds likeliest tokens, they are the first of the largest logits, and -1 where these are none."""

    @classmethod
    def excuse(cls, case: ModelCase) -> str | None:
        finds = isinstance(case.model, GreedyHead)
        return None if finds else f"the model {case.label} finds no tokens without logits"

    def test_likeliest_tokens_are_the_first_of_the_largest_logits(self, case: ModelCase) -> None:
        hidden = ModelServing(case.model).hidden({0: case.tokens(ROWS)})
        # Rows of zeros have equal logits, or those of a bias.
        hidden = torch.cat([hidden, torch.zeros_like(hidden[:1]), torch.full_like(hidden[:1], torch.nan)])
        with torch.no_grad():
            found, logits = case.model.greedy_tokens(hidden), case.model.logits(hidden)
        if found is None:
            return
        expected = logits.argmax(-1).where(logits.amax(-1).isfinite(), -1)
        require(
            torch.equal(found, expected),
            f"likeliest tokens are {found.tolist()}, those of the logits {expected.tolist()}",
        )
