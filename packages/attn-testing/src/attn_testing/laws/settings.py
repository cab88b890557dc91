"""What a mechanism promises to take, it takes."""

from __future__ import annotations

from attn_core import Capability

from attn_testing.expect import LawBroken, require
from attn_testing.law import MechanismLaw
from attn_testing.subject import Refusal, Subject


class Settings(MechanismLaw):
    """Declared capabilities are honoured: causal and not, grouped heads, rotary positions."""

    def test_every_promised_setting_is_taken(self, subject: Subject) -> None:
        for refusal in subject.refusals:
            if promised(refusal, subject):
                raise LawBroken(f"{refusal.label} is refused: {refusal.error}") from refusal.error

    def test_a_layer_keeps_the_shape_of_its_input(self, subject: Subject) -> None:
        for case in subject.cases:
            query = case.rows(2, 5)
            shape = tuple(case.attend(query, case.source(2, 4)).shape)
            require(shape == tuple(query.shape), f"{case.label}: output {shape} for input {tuple(query.shape)}")


def promised(refusal: Refusal, subject: Subject) -> bool:
    """Whether a capability, or being a mechanism at all, promises that this setting is taken."""
    grouped = refusal.setting.get("key_value_heads") and subject.mechanism.can(Capability.GROUPED)
    turned = refusal.setting.get("rotary") and subject.mechanism.can(Capability.ROTARY)
    first = all(refusal.setting.get(name) == value for name, value in subject.settings[0].items())
    return bool(grouped or turned or first)
