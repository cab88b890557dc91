"""Company changes nothing."""

from __future__ import annotations

import torch

from attn_testing.expect import require_same
from attn_testing.law import Law
from attn_testing.laws.batch_invariance import PLAN
from attn_testing.laws.model.step_equals_forward import TOKENS
from attn_testing.model_subject import ModelCase, ModelServing


class CrowdEqualsAlone(Law):
    """A request in a crowd gets the logits it gets alone."""

    def test_requests_in_a_crowd_equal_the_full_forward_of_each(self, case: ModelCase) -> None:
        serving = ModelServing(case.model)
        tokens = {name: case.tokens(TOKENS, seed=name) for name in range(4)}
        out: dict[int, list[torch.Tensor]] = {name: [] for name in tokens}
        for plan in PLAN:
            at = {name: serving.done.get(name, 0) for name in plan}
            got = serving.step({name: tokens[name][at[name] : at[name] + n] for name, n in plan.items()})
            for name, logits in got.items():
                out[name].append(logits)
        for name, pieces in out.items():
            logits = torch.cat(pieces)
            with torch.no_grad():
                full = case.model(tokens[name][None, : len(logits)])[0]
            require_same(logits, full, f"logits of request {name} in a crowd and alone", case.tolerance)
