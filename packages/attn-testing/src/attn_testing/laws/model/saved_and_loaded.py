"""A model is its state dict."""

from __future__ import annotations

import torch

from attn_testing.expect import require_same
from attn_testing.law import Law
from attn_testing.model_subject import ModelCase


class SavedAndLoaded(Law):
    """A fresh model that loads another's state dict gives the same logits."""

    def test_a_model_that_loads_the_state_of_another_gives_the_same(self, case: ModelCase) -> None:
        one, other = case.build(seed=0), case.build(seed=1)
        other.load_state_dict(one.state_dict())
        tokens = case.tokens(2, 7)
        with torch.no_grad():
            require_same(other(tokens), one(tokens), "a loaded model and the saved one", 1e-12)
