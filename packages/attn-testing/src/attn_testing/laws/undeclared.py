"""What a mechanism does not declare, it refuses; so no law falls silent without cause."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from attn_core import Capability, Rotary, configure
from attn_core.errors import UserError

from attn_testing.case import Case
from attn_testing.expect import LawBroken, require
from attn_testing.law import MechanismLaw
from attn_testing.subject import CONTEXT, Subject


class Undeclared(MechanismLaw):
    """What is not declared is refused, never ignored: padding, sources, causality, grouping, borrowing, dropping."""

    def test_a_mask_of_padded_keys_is_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.PADDING):
            case = subject.cases[0]
            key_padding_mask = torch.tensor([[True, True, False]])
            source = case.source(1, 3)
            refuses(lambda: case.attend(case.rows(1, 3), source, key_padding_mask), "PADDING", "a mask of padded keys")

    def test_a_source_is_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.CROSS):
            case = subject.cases[0]
            refuses(lambda: case.attend(case.rows(1, 3), case.rows(1, 3)), "CROSS", "a source")

    def test_weights_are_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.WEIGHTS):
            case = subject.cases[0]
            refuses(lambda: case.weights(case.rows(1, 3), case.source(1, 3)), "WEIGHTS", "a call for weights")

    def test_grouped_heads_are_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.GROUPED):
            refuses(lambda: build(subject, key_value_heads=2), "GROUPED", "fewer key/value heads than query heads")

    def test_rotary_positions_are_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.ROTARY):
            refuses(lambda: build(subject, rotary=Rotary()), "ROTARY", "rotary positions")

    def test_borrowing_is_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.BORROWS):
            refuses(lambda: build(subject, borrows=True), "BORROWS", "a config that borrows keys and values")

    def test_dropping_weights_is_refused(self, subject: Subject) -> None:
        if not subject.mechanism.drops_weights:
            refuses(lambda: build(subject, dropout=0.5), "drops_weights", "a config that drops weights")

    def test_a_mechanism_that_is_not_causal_refuses_to_be(self, subject: Subject) -> None:
        can = subject.mechanism.can
        if not can(Capability.CAUSAL) and not can(Capability.CROSS):
            refuses(lambda: directed(subject, causal=True), "CAUSAL", "causal=True")

    def test_a_mechanism_that_is_only_causal_refuses_not_to_be(self, subject: Subject) -> None:
        can = subject.mechanism.can
        if can(Capability.CAUSAL) and not can(Capability.BIDIRECTIONAL) and not can(Capability.CROSS):
            refuses(lambda: directed(subject, causal=False), "BIDIRECTIONAL", "causal=False")

    def test_weights_that_are_not_declared_normalised_are_not(self, subject: Subject) -> None:
        if subject.mechanism.can(Capability.WEIGHTS) and not subject.mechanism.can(Capability.NORMALISED):
            require(
                not all(normalised(case) for case in subject.cases),
                "all weights are not negative and sum to one, but NORMALISED is not declared",
            )


def build(subject: Subject, **setting: Any) -> Any:
    """A layer at the first setting, changed by `setting`."""
    values = {"context": CONTEXT, **subject.settings[0], **subject.modes[0], "heads": 4, "width": 16, **setting}
    return subject.mechanism.build(configure(subject.mechanism, subject.options, **values))


def directed(subject: Subject, *, causal: bool) -> Any:
    """A layer of a config that says so itself: `configure` would refuse it before the mechanism is asked."""
    values = {"context": CONTEXT, **subject.settings[0], **subject.modes[0], "heads": 4, "width": 16}
    config = configure(subject.mechanism, subject.options, **values)
    return subject.mechanism.build(dataclasses.replace(config, causal=causal))


def refuses(call: Any, capability: str, what: str) -> None:
    """Raise `LawBroken` unless the call is refused."""
    try:
        call()
    except (UserError, TypeError, NotImplementedError, AttributeError):
        return
    raise LawBroken(f"{what} is taken, but {capability} is not declared: declare it, or refuse with a UserError")


def normalised(case: Case) -> bool:
    """Whether the weights of one random input are."""
    weights = case.weights(case.rows(1, 5), case.source(1, 5))
    return bool((weights >= 0).all()) and bool((weights.sum(-1) - 1).abs().max() < 1e-9)
