"""No installed mechanism is called broken at its default options, by the laws that depend on how long sequences are."""

import pytest
from attn_core import installed
from attn_testing.check import judge
from attn_testing.laws import EveryOptionActs, StatesAreRead
from attn_testing.subject import SETTINGS, Subject


@pytest.mark.sweep(36)
@pytest.mark.parametrize("name", installed().mechanisms.names())
def test_a_right_mechanism_keeps_the_laws_of_length_at_its_defaults(name):
    subject = Subject(name, settings=SETTINGS[:1])
    results = [judge(law, subject) for law in (EveryOptionActs, StatesAreRead)]
    assert [result.detail for result in results if not result.passed] == []
