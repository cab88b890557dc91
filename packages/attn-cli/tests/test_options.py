"""Options of a mechanism from the command line."""

from __future__ import annotations

import pytest
from attn_cli.options import parse_options
from attn_cli.output import human_bytes, human_count
from attn_core.errors import InvalidValue


def test_values_are_numbers_where_they_look_like_numbers_and_text_otherwise() -> None:
    assert parse_options(["window=64", "slope=0.5", "kind=elu", "flag=true"]) == {
        "window": 64,
        "slope": 0.5,
        "kind": "elu",
        "flag": True,
    }


@pytest.mark.parametrize("pair", ["window", "=64", ""])
def test_a_pair_without_a_name_or_an_equals_sign_is_refused(pair: str) -> None:
    with pytest.raises(InvalidValue, match="NAME=VALUE"):
        parse_options([pair])


def test_bytes_and_counts_are_decimal() -> None:
    assert human_bytes(2621440000) == "2.62 GB"
    assert human_bytes(999) == "999 B"
    assert human_count(1500) == "1.50 k"
