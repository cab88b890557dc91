"""`check` says of every law whether it holds, fails or has nothing to say."""

import pytest
import torch
from attn_core import Capability, ComputedMechanism, MechanismConfig
from attn_core.errors import InvalidValue, UnknownName, UserError
from broken import BROKEN
from broken.unseen import LeaksFar

from attn_testing import check, laws
from attn_testing.check import judge
from attn_testing.subject import Subject

CONFIG = MechanismConfig(hidden_size=8, num_heads=2)
ONE = ({"hidden_size": 8, "num_heads": 2},)


def test_a_mechanism_that_does_not_exist_is_answered_at_once():
    with pytest.raises(UnknownName, match="unknown mechanism 'no_such_mechanism'"):
        check("no_such_mechanism")


@pytest.mark.parametrize("options", [{"windw": 4}, {"window": 0}])
def test_options_that_no_setting_accepts_are_refused_and_no_law_is_kept_by_no_case(options):
    with pytest.raises(UserError, match=next(iter(options))):
        check("sliding_window", options)


def test_every_law_has_a_result_with_a_summary():
    results = check(BROKEN[laws.Described])
    assert [result.law for result in results] == [law.title() for law in laws.MECHANISM_LAWS]
    assert all(result.summary.endswith(".") for result in results)
    assert [result.law for result in results if not result.passed] == ["described"]


def test_laws_meet_every_mode_size_and_feature_that_they_apply_to_in_half_the_cases():
    subject = Subject("gqa")
    counts = [0, 0]
    for law in laws.MECHANISM_LAWS:
        every, _ = law.applicable(subject.cases)
        if every and law.parts(every[0]) is None:
            both = every, law.covering(every)
            words = [{word for case in cases for word in case.label.split("-")} for cases in both]
            assert words[0] == words[1], law
            counts = [count + len(cases) for count, cases in zip(counts, both, strict=True)]
    assert counts[1] < counts[0] / 2


def test_a_broken_law_names_the_case_and_what_was_seen():
    result = judge(laws.ChunkedPrefill, Subject(BROKEN[laws.ChunkedPrefill], settings=ONE))
    assert not result.passed
    assert result.detail.startswith(
        "causal-width8-heads2: LawBroken: outputs of a prompt in chunks of (1, 4, 2, 5) and at once differ"
    )


def test_a_law_that_does_not_apply_says_why():
    result = judge(laws.RowSums, Subject(BROKEN[laws.PaddingInvariance], settings=ONE))
    assert (result.passed, result.applied) == (True, False)
    assert result.detail == "sound does not declare WEIGHTS and NORMALISED"


@pytest.mark.parametrize("fault", ["step without INCREMENTAL", "INCREMENTAL without state", "TypeError in build"])
def test_a_mechanism_that_contradicts_itself_breaks_a_law_and_not_the_check(fault):
    class Contradicting(type(BROKEN[laws.Described])):
        capabilities = frozenset({Capability.CAUSAL} | ({Capability.INCREMENTAL} if "state" in fault else set()))

        def build(self, config):
            if "TypeError" in fault:
                raise TypeError("no layer")
            layer = torch.nn.Linear(config.hidden_size, config.hidden_size)
            layer.step = layer.forward
            return layer

        state = ComputedMechanism.state
        spec = ComputedMechanism.spec

    result = next(found for found in check(Contradicting()) if found.law == "settings")
    assert not result.passed
    assert fault.partition(" ")[0] in result.detail


def test_a_mechanism_that_raises_breaks_the_law_and_not_the_check():
    class Raises(type(BROKEN[laws.Described])):
        def cost(self, config, shape):
            raise ZeroDivisionError("no price")

    result = judge(laws.Cost, Subject(Raises(), settings=ONE))
    assert not result.passed
    assert "ZeroDivisionError: no price" in result.detail


def test_more_tokens_find_what_begins_behind_the_usual_ones():
    class Leaks(type(LeaksFar().build(CONFIG))):
        def changed(self, out, query):
            return super().changed(out, query) if out.shape[1] > 60 else out

    class Late(LeaksFar):
        layer = Leaks

    usual, more = (judge(laws.CausalityByPerturbation, Subject(Late(), settings=ONE, tokens=n)) for n in (37, 80))
    assert usual.passed
    assert not more.passed


def test_too_few_tokens_are_refused():
    with pytest.raises(InvalidValue, match=r"tokens: 3 .* 26"):
        check(LeaksFar(), tokens=3)
