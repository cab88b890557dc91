"""Faults that no single short call shows are found at default options, each by the law that names it."""

import pytest
from broken import QUIET
from broken.recurrent import Specified, Summing
from broken.sizes import Windowed

from attn_testing.check import judge
from attn_testing.subject import Subject

ONE = ({"hidden_size": 16, "num_heads": 4},)
LAWS = sorted({law for law, _ in QUIET}, key=lambda law: law.title())


@pytest.mark.parametrize(
    ("law", "mechanism"), QUIET, ids=lambda one: one.title() if isinstance(one, type) else type(one).__name__
)
def test_a_quiet_fault_is_found_by_its_law(law, mechanism):
    result = judge(law, Subject(mechanism, settings=ONE))
    assert not result.passed
    assert "LawBroken" in result.detail


@pytest.mark.parametrize("mechanism", [Windowed(), Summing(), Specified()], ids=lambda one: one.name)
def test_what_quiet_faults_are_derived_from_keeps_their_laws(mechanism):
    results = [judge(law, Subject(mechanism, settings=ONE)) for law in LAWS]
    assert [result for result in results if not result.passed] == []
