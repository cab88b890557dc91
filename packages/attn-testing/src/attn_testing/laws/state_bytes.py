"""What a request weighs in memory is what its specs say."""

from __future__ import annotations

from attn_core import state_bytes

from attn_testing.case import Case
from attn_testing.expect import require
from attn_testing.law import MechanismLaw
from attn_testing.laws.decode_equals_forward import silent_where_nothing_decodes
from attn_testing.serving import Serving

SOURCE = 4


class StateBytes(MechanismLaw):
    """The tensors remembered after every step weigh exactly `state_bytes`."""

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_remembered_tensors_weigh_what_the_formula_says(self, case: Case) -> None:
        serving = Serving(case)
        serving.open(0, case.source(SOURCE))
        tokens = 0
        for length in (1, 5, 1, 2, 9):
            serving.step({0: case.rows(length)})
            tokens += length
            said = state_bytes(case.specs, tokens=tokens, source=SOURCE if case.cross else 0, dtype="float64")
            held = serving.store.live_bytes(0, tokens)
            require(held == said, f"after {tokens} tokens the state weighs {held} bytes, the specs say {said}")
