"""Alike cases of one test: as one test that names those that fail, or by day only one of each kind."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest


def each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test of all values, for which `pytest.mark.parametrize` would make one each: for hundreds of short ones.

    A value that fails is named and hides no other. `names` are those of the arguments, with a comma between two; `-k`
    finds the test by any value's name.
    """
    wanted, given = names.split(","), list(values)

    def over(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_of_them(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for value in given:
                taken = value if len(wanted) > 1 else (value,)
                with subtests.test(label(value)):
                    test(**dict(zip(wanted, taken, strict=True)), **fixtures)

        own = [one for one in inspect.signature(test).parameters.values() if one.name not in wanted]
        fixture = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        shown = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        all_of_them.__signature__ = inspect.Signature([*shown, fixture])  # type: ignore[attr-defined]
        vars(all_of_them).update(dict.fromkeys(map(label, given)))
        return all_of_them

    return over


def label(value: Any) -> str:
    """What names a value: its own name, or those of its parts."""
    if isinstance(value, tuple):
        return "-".join(map(label, value))
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)


def by_day(cases: Sequence[pytest.Item], test: str, of: int | Callable[..., Hashable]) -> list[pytest.Item]:
    """One case of each kind, another one for each test: `of` gives the kind of a case's arguments, or is the number of
    kinds into which cases are divided as they come."""
    kinds: defaultdict[Hashable, list[pytest.Item]] = defaultdict(list)
    for number, case in enumerate(cases):
        alike = number * of // len(cases) if isinstance(of, int) else of(**case.callspec.params)  # type: ignore[attr-defined]
        kinds[alike].append(case)
    shift = zlib.crc32(test.encode())
    return [alike[(shift + number) % len(alike)] for number, alike in enumerate(kinds.values())]


@functools.cache
def kind_of(name: str) -> Hashable:
    """What code of others a mechanism meets: stores of its states, kernels of its spec or recurrence, positions that
    turn, and steps or replay. Of a name that is no mechanism's, the name."""
    from attn_core import Capability, configure, installed  # tests without torch have it nowhere

    if name not in installed().mechanisms.names():
        return name
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, mechanism.sketch, hidden_size=32, num_heads=4, max_seq_len=64)
    states = [(type(one), getattr(one, "every", 1) > 1, len(one.fields)) for one in mechanism.state(config).values()]
    able = [mechanism.can(one) for one in (Capability.INCREMENTAL, Capability.ROTARY)]
    return frozenset(states), *able, mechanism.spec(config) is None, mechanism.recurrence(config) is None
