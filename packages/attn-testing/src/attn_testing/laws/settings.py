"""What a mechanism promises to take, it takes."""

from __future__ import annotations

from attn_core import Capability

from attn_testing.expect import LawBroken, require
from attn_testing.law import MechanismLaw
from attn_testing.subject import Subject

ASKED = {Capability.GROUPED: "key_value_heads", Capability.ROTARY: "rotary"}
"""Capabilities that let a mechanism take a field of the config, in some of its values at least."""

ADDED = ("context", "causal")
"""What the kit adds to every setting."""


class Settings(MechanismLaw):
    """Declared capabilities are honoured: causal and not, grouped heads, rotary positions."""

    def test_the_first_setting_is_taken_in_every_declared_mode(self, subject: Subject) -> None:
        for refusal in subject.refusals:
            asked = {name: value for name, value in refusal.setting.items() if name not in ADDED}
            if asked == {name: value for name, value in subject.settings[0].items() if name not in ADDED}:
                raise LawBroken(f"{refusal.label} is refused: {refusal.error}") from refusal.error

    def test_a_declared_capability_is_taken_in_some_setting(self, subject: Subject) -> None:
        for capability, field in ASKED.items():
            asked = [refusal for refusal in subject.refusals if refusal.setting.get(field)]
            taken = [case for case in subject.cases if case.setting.get(field)]
            if asked and not taken:
                raise LawBroken(f"{capability.name} is declared, but {asked[0].label} is refused: {asked[0].error}")

    def test_a_layer_keeps_the_shape_of_its_input(self, subject: Subject) -> None:
        for case in subject.cases:
            query = case.rows(2, 5)
            shape = tuple(case.attend(query, case.source(2, 4)).shape)
            require(shape == tuple(query.shape), f"{case.label}: output {shape} for input {tuple(query.shape)}")
