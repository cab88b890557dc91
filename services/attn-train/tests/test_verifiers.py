"""Verifiers of answers, on answers as models and published datasets write them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from attn_train.verifiers import accuracy, json_schema, last_number, regex


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n#### 18", 18),  # as GSM8K has it
        (r"so it is \boxed{1,234.50}. Check: 7", Fraction("1234.5")),
        (r"\boxed{\frac{3}{4}} as 0.75 = 3 / 4", Fraction(3, 4)),
        (r"\boxed{2^{10}=1024}", 1024),
        ("first #### 1\nthen #### -2,000", -2000),
        ("The answer is \u22127.", -7),
        ("7-3", 3),
        ("x=.5", Fraction(1, 2)),
        ("1,23", 23),
        ("1/0", None),
        ("none at all", None),
        ("9" * 5000, None),
    ],
)
def test_the_last_number_is_found_exactly(text, number):
    assert last_number(text) == number


def test_numbers_are_compared_by_value():
    completions = ["= 0.50", "1,000", "12", "I do not know", "5 = 5, 6"]
    assert accuracy(completions, ["1/2", "#### 1000", 12, 3, "5"]) == [1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="'forty' has no number"):
        accuracy(["40"], ["forty"])


def test_json_is_checked_by_its_schema():
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 2}}}
    completions = ['{"a": 2}', '{"a": 1}', '{"a": NaN}', '{"b": 2}', '{"a": 2} ', '```{"a": 2}```', "[" * 100_000]
    assert json_schema(completions, [schema] * 7) == [1, 0, 0, 0, 1, 0, 0]
    assert json_schema(["3"], ['{"type": "integer"}']) == [1]
    with pytest.raises(Exception, match="no such type"):
        json_schema(["1"], [{"type": "no such type"}])
    with pytest.raises(Exception, match=r"(?i)unresolvable"):
        json_schema(["1"], [{"$ref": "http://127.0.0.1:9/schema.json"}])


def test_a_regular_expression_matches_the_whole_completion():
    assert regex(["ab", "abc", "a\nb"], ["a.", "a.", "(?s)a.b"]) == [1, 0, 1]
