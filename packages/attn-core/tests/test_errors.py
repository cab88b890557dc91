"""Errors travel between processes whole, and help."""

import pickle

import pytest

from attn_core import errors
from attn_core.errors import AttnError, ContextLengthExceeded, InvalidValue, UnknownName, UserError, near_names


def every_error():
    known, found = [AttnError], []
    while known:
        kind = known.pop()
        found.append(kind)
        known += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_an_error_that_was_pickled_is_the_same_error(kind):
    error = kind("it went wrong", field="heads", given=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == again.message == "it went wrong"
    assert again.metadata == {"field": "heads", "given": "3"}


def test_an_error_with_facts_of_its_own_is_pickled_with_them():
    again = pickle.loads(pickle.dumps(ContextLengthExceeded.of(100, 50, 128)))
    assert str(again) == "prompt of 100 tokens + 50 new tokens exceed the context of 128 tokens"
    assert again.metadata == {"prompt_tokens": "100", "max_new_tokens": "50", "max_seq_len": "128"}


def test_no_two_errors_share_a_reason():
    reasons = [kind.reason for kind in set(every_error())]
    assert len(reasons) == len(set(reasons))
    assert all(reason == reason.upper() and " " not in reason for reason in reasons)


def test_mistakes_of_users_are_value_errors_too():
    assert issubclass(UserError, ValueError)
    assert not issubclass(errors.InternalError, ValueError)


def test_near_names_come_best_first():
    assert near_names("gqaa", ["gqa", "mqa", "linear"])[0] == "gqa"
    assert near_names("zzz", ["gqa", "linear"]) == []


def test_an_unknown_name_without_near_ones_lists_what_there_is():
    assert str(UnknownName.of("cache", "zzz", ["paged", "ring"])) == "unknown cache 'zzz'; known: paged, ring"


def test_an_invalid_value_says_what_was_given_and_what_is_allowed():
    error = InvalidValue.of("temperature", -1, "a number from 0")
    assert str(error) == "temperature: -1 is not allowed; allowed: a number from 0"
    assert error.metadata == {"field": "temperature", "given": "-1", "allowed": "a number from 0"}
