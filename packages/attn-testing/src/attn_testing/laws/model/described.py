"""A model says what it is, and refuses what it does not know."""

from __future__ import annotations

from attn_core import state_bytes
from attn_core.errors import UserError

from attn_testing.expect import LawBroken, require
from attn_testing.law import Law
from attn_testing.model_subject import ModelCase, ModelServing, ModelSubject


class Described(Law):
    """A family has a name and a summary, refuses unknown fields; a model says its vocabulary, context and states."""

    def test_a_family_says_what_it_is(self, subject: ModelSubject) -> None:
        require(subject.family.name and subject.family.summary, "the family has no name or no summary")

    def test_an_unknown_field_is_refused(self, subject: ModelSubject) -> None:
        for label, values in subject.configs.items():
            try:
                subject.family.configure({**values, "no_such_field": 1})
            except UserError:
                continue
            raise LawBroken(f"{label}: a field that does not exist is taken")

    def test_logits_are_over_the_vocabulary_and_sequences_fit_the_context(self, case: ModelCase) -> None:
        require(case.model.context >= 13, f"a context of {case.model.context} tokens is too short to be tried")
        shape = tuple(case.model(case.tokens(2, 5)).shape)
        require(shape == (2, 5, case.model.vocabulary), f"logits of [2, 5] tokens are {shape}")

    def test_remembered_tensors_weigh_what_the_states_say(self, case: ModelCase) -> None:
        serving = ModelServing(case.model)
        serving.step({0: case.tokens(5)})
        serving.step({0: case.tokens(1)})
        layers = case.model.state_specs().values()
        said = sum(state_bytes(states, tokens=6, dtype="float64") for states in layers)
        held = serving.store.live_bytes(0, 6)
        require(held == said, f"after 6 tokens {held} bytes are held, the states say {said}")
