"""Laws of language models."""

from __future__ import annotations

import torch
from attn_core import state_bytes
from attn_core.errors import UserError
from attn_core.models import GreedyHead

from attn_testing.law import Law, LawBroken, require, require_same
from attn_testing.laws.decoding import PLAN
from attn_testing.model_subject import ModelCase, ModelServing, ModelSubject


class Described(Law):
    """A family has a name and a summary, and refuses unknown fields; a model keeps its declared sizes and states."""

    def test_a_family_says_what_it_is(self, subject: ModelSubject) -> None:
        require(subject.family.name and subject.family.summary, "the family has no name or no summary")

    def test_an_unknown_field_is_refused(self, subject: ModelSubject) -> None:
        for label, values in subject.configs.items():
            try:
                subject.family.configure({**values, "no_such_field": 1})
            except UserError:
                continue
            raise LawBroken(f"{label}: a field that does not exist is accepted")

    def test_logits_are_over_the_vocabulary_and_sequences_fit_the_context(self, case: ModelCase) -> None:
        require(
            case.model.max_seq_len >= 13,
            f"max_seq_len {case.model.max_seq_len} is too short for this law, which needs 13 tokens",
        )
        shape = tuple(case.model(case.tokens(2, 5)).shape)
        require(shape == (2, 5, case.model.vocab_size), f"logits of [2, 5] tokens have shape {shape}")

    def test_remembered_tensors_weigh_what_the_states_say(self, case: ModelCase) -> None:
        serving = ModelServing(case.model)
        serving.step({0: case.tokens(5)})
        serving.step({0: case.tokens(1)})
        layers = case.model.state_specs().values()
        declared = sum(state_bytes(states, tokens=6, dtype="float64") for states in layers)
        held = serving.store.live_bytes(0, 6)
        require(held == declared, f"after 6 tokens {held} bytes are held, the state specs declare {declared}")


class Causality(Law):
    """Changing later tokens changes no earlier logits, and changing a token changes its own."""

    def test_later_tokens_change_no_earlier_logits(self, case: ModelCase) -> None:
        tokens = case.tokens(2, 9)
        with torch.no_grad():
            before = case.model(tokens)
            for first in (1, 4, 8):
                changed = tokens.clone()
                changed[:, first:] = (changed[:, first:] + 1) % case.model.vocab_size
                after = case.model(changed)
                require_same(after[:, :first], before[:, :first], f"logits before changed position {first}", 1e-10)
                moved = (after[:, first] - before[:, first]).abs().max().item()
                require(moved > 1e-6, f"a different token at position {first} changes its logits by only {moved:g}")


TOKENS = 12
SPLITS = ((12,), (1,) * 12, (5, 1, 1, 1, 1, 1, 1, 1), (3, 4, 1, 4))


class StepEqualsForward(Law):
    """Logits of steps, of the whole sequence, single tokens or chunks, equal those of the full forward pass."""

    def test_steps_of_any_length_equal_the_full_forward(self, case: ModelCase) -> None:
        tokens = case.tokens(TOKENS)
        with torch.no_grad():
            full = case.model(tokens[None])[0]
        for split in SPLITS:
            serving = ModelServing(case.model)
            logits = torch.cat([serving.step({0: piece})[0] for piece in torch.split(tokens, list(split))])
            require_same(logits, full, f"logits of steps {split} and of the full forward pass", case.tolerance)


class CrowdEqualsAlone(Law):
    """A request gets the same logits in a step with other requests as alone."""

    def test_requests_in_a_crowd_equal_the_full_forward_of_each(self, case: ModelCase) -> None:
        serving = ModelServing(case.model)
        tokens = {name: case.tokens(TOKENS, seed=name) for name in range(7)}
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
            require_same(
                logits, full, f"logits of request {name} in steps with other requests and alone", case.tolerance
            )


ROWS = 12


class GreedyTokensOfLogits(Law):
    """Greedy tokens that a model finds are the first of its largest logits, and -1 where these are not finite."""

    @classmethod
    def excuse(cls, case: ModelCase) -> str | None:
        finds = isinstance(case.model, GreedyHead)
        return None if finds else f"the model {case.label} does not implement GreedyHead"

    def test_likeliest_tokens_are_the_first_of_the_largest_logits(self, case: ModelCase) -> None:
        hidden = ModelServing(case.model).hidden({0: case.tokens(ROWS)})
        # A row of zeros has equal logits, or those of a bias.
        hidden = torch.cat([hidden, torch.zeros_like(hidden[:1]), torch.full_like(hidden[:1], torch.nan)])
        with torch.no_grad():
            found, logits = case.model.greedy_tokens(hidden), case.model.logits(hidden)
        if found is None:
            return
        expected = logits.argmax(-1).where(logits.amax(-1).isfinite(), -1)
        require(
            torch.equal(found, expected),
            f"greedy_tokens are {found.tolist()}, those of the largest logits {expected.tolist()}",
        )


class SavedAndLoaded(Law):
    """A new model that loads the state dict of another one gives the same logits."""

    def test_a_model_that_loads_the_state_of_another_gives_the_same(self, case: ModelCase) -> None:
        one, other = case.build(seed=0), case.build(seed=1)
        other.load_state_dict(one.state_dict())
        tokens = case.tokens(2, 7)
        with torch.no_grad():
            require_same(other(tokens), one(tokens), "logits of the loaded model and of the saved one", 1e-12)


MODEL_LAWS: tuple[type[Law], ...] = (
    Described,
    Causality,
    StepEqualsForward,
    CrowdEqualsAlone,
    GreedyTokensOfLogits,
    SavedAndLoaded,
)
