"""Every law has a mechanism that is broken on purpose, and finds it; every other law finds nothing there."""

import pytest
from broken import ALSO_BROKEN, BROKEN
from broken.ordinary import OnlyPlain
from broken.sound import Dropper, SharedKvMechanism, Sound, Splitter

from attn_testing.check import judge
from attn_testing.laws import (
    MECHANISM_LAWS,
    BatchInvariance,
    CausalityByGradient,
    Compiles,
    Devices,
    DroppedWeights,
    Gradients,
    HeadSplit,
    KernelNames,
    KVSharing,
    OnMeta,
    Preemption,
)
from attn_testing.subject import Subject

SETTINGS = ({"hidden_size": 16, "num_heads": 4}, {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "bias": True})


def test_there_is_a_broken_mechanism_for_every_law():
    assert set(BROKEN) == set(MECHANISM_LAWS)


@pytest.mark.parametrize("law", MECHANISM_LAWS, ids=lambda law: law.title())
def test_a_mechanism_that_breaks_one_law_is_found_by_that_law_alone(law, some):
    subject = Subject(BROKEN[law], settings=SETTINGS)
    # Compiling takes seconds, so it is judged where it is what breaks, and for the sound mechanism.
    others = some(MECHANISM_LAWS, 3, MECHANISM_LAWS.index(law))
    judged = [one for one in {law, *others} if one is not Compiles or law is Compiles]
    results = [judge(one, subject, every_case=False) for one in judged]
    # Preempted requests are computed beside others; and gradients to inputs that do not matter are no differences.
    also = {BatchInvariance: {Preemption}, CausalityByGradient: {Gradients}, Devices: {OnMeta}}.get(law, set())
    found = {result.law: result.detail for result in results if not result.passed}
    assert set(found) - {one.title() for one in also} == {law.title()}, found
    assert "LawBroken" in found[law.title()]


@pytest.mark.parametrize(
    ("law", "mechanism"), ALSO_BROKEN, ids=lambda one: one.title() if isinstance(one, type) else type(one).__name__
)
def test_what_a_short_trial_would_miss_is_found(law, mechanism):
    result = judge(law, Subject(mechanism, settings=SETTINGS), every_case=False)
    assert result.applied
    assert not result.passed
    assert judge(law, Subject(Sound(), settings=SETTINGS)).passed


def test_the_sound_mechanism_breaks_no_law():
    further = {
        KVSharing: SharedKvMechanism(),
        DroppedWeights: Dropper(),
        HeadSplit: Splitter(),
        KernelNames: OnlyPlain(),
    }
    results = [judge(law, Subject(Sound(), settings=SETTINGS)) for law in MECHANISM_LAWS if law not in further]
    for able in further.values():
        judged = [law for law in MECHANISM_LAWS if law is not Compiles and (law not in further or further[law] is able)]
        results += [judge(law, Subject(able, settings=SETTINGS)) for law in judged]
    assert [result for result in results if not (result.passed and result.applied)] == []
