"""Every number that a caller can give has a largest value."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, get_args

import attn_schema
import pytest
from attn_core.errors import InvalidValue
from attn_schema.schema import Checked, FieldInfo, checked, element_of, fields_of, is_noun


def nouns() -> list[type[Checked]]:
    """All nouns that callers create."""
    for module in pkgutil.iter_modules(attn_schema.__path__, "attn_schema."):
        importlib.import_module(module.name)
    found, pending = [], [Checked]
    while pending:
        pending += (own := pending.pop().__subclasses__())
        found += own
    return sorted((noun for noun in found if noun.__module__.startswith("attn_schema.")), key=lambda n: n.__qualname__)


def whole_numbers(info: FieldInfo) -> Iterator[FieldInfo]:
    """The field, or the elements of its list or mapping, where they are whole numbers."""
    if info.kind is int:
        yield info
    for part in get_args(info.kind) if not is_noun(info.kind) else ():
        if part not in (Ellipsis, Any) and not isinstance(part, str):
            yield from whole_numbers(element_of(part))


@pytest.mark.parametrize("noun", nouns(), ids=lambda noun: noun.__qualname__)
def test_every_whole_number_has_a_least_and_a_largest_value(noun: type[Checked]) -> None:
    for field in fields_of(noun):
        for info in whole_numbers(field):
            assert {"ge", "le"} <= info.bounds.keys(), f"{noun.__qualname__}.{field.name}"
            assert checked(info, int(info.bounds["le"])) == info.bounds["le"]
            with pytest.raises(InvalidValue):
                checked(info, int(info.bounds["le"]) + 1)
