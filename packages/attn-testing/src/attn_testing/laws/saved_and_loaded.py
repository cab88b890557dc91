"""A layer is its state dict."""

from __future__ import annotations

import torch

from attn_testing.case import Case
from attn_testing.expect import require_same
from attn_testing.law import MechanismLaw


class SavedAndLoaded(MechanismLaw):
    """A fresh layer that loads another's state dict computes the same."""

    cases_at_most = 2

    def test_a_layer_that_loads_the_state_of_another_computes_the_same(self, case: Case) -> None:
        one, other = case.build(seed=0), case.build(seed=1)
        other.load_state_dict(one.state_dict())
        query, source = case.rows(2, 6), case.source(2, 5)
        with torch.no_grad():
            loaded, saved = case.attend(query, source, None, other), case.attend(query, source, None, one)
        require_same(loaded, saved, "a loaded layer and the saved one", 1e-12)
