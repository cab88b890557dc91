"""A mechanism says what it is."""

from __future__ import annotations

import re

import torch
from attn_core import Capability, Paper, configure
from attn_core.errors import UnknownName

from attn_testing.expect import LawBroken, require
from attn_testing.law import MechanismLaw
from attn_testing.subject import Subject

TOKENS = 12


class Described(MechanismLaw):
    """A mechanism has a name, one line about it, an equation, a paper and a sketch, and takes no unknown option."""

    def test_a_mechanism_says_what_it_is(self, subject: Subject) -> None:
        mechanism = subject.mechanism
        name = getattr(mechanism, "name", "")
        require(
            re.fullmatch(r"[a-z][a-z0-9_]*", name), f"name {name!r} is not of small letters, digits and underscores"
        )
        summary = getattr(mechanism, "summary", "")
        require(summary.strip() and "\n" not in summary, f"summary {summary!r} is not one line")
        require(getattr(mechanism, "equation", "").strip(), "there is no equation")
        require(isinstance(getattr(mechanism, "paper", None), Paper), "there is no paper")
        unknown = set(mechanism.capabilities) - set(Capability)
        require(not unknown, f"capabilities {unknown} are not of {', '.join(Capability)}")

    def test_a_layer_of_its_sketch_attends(self, subject: Subject) -> None:
        mechanism = subject.mechanism
        causal = mechanism.can(Capability.CAUSAL)
        config = configure(mechanism, mechanism.sketch, width=16, heads=2, causal=causal, context=TOKENS)
        rows = torch.randn(1, TOKENS, 16)
        source = (rows,) if mechanism.can(Capability.CROSS) else ()
        with torch.no_grad():
            out = mechanism.build(config).eval()(rows, *source)
        require(out.shape == rows.shape, f"with options {dict(mechanism.sketch)} it gives {tuple(out.shape)}")

    def test_an_unknown_option_is_refused(self, subject: Subject) -> None:
        try:
            configure(subject.mechanism, {"no_such_option": 1}, width=16)
        except UnknownName:
            return
        raise LawBroken("an option that does not exist is taken")
