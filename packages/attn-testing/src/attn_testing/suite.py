"""What makes laws tests of pytest, and keeps them there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from attn_testing.expect import LawBroken
from attn_testing.law import Law


class Suite:
    """Base of the classes that a plugin's test file inherits.

    `laws` are all laws of the kind; a class that inherits only some of them is checked against those.
    """

    laws: ClassVar[tuple[type[Law], ...]] = ()

    @classmethod
    def make_subject(cls) -> Any:
        """What the class tests: an object with `cases`."""
        raise NotImplementedError(f"{cls.__name__} must say what it tests")

    @classmethod
    def subject(cls) -> Any:
        """What the class tests, made once."""
        if "_subject" not in vars(cls):
            cls._subject = cls.make_subject()  # type: ignore[attr-defined]
        return cls._subject  # type: ignore[attr-defined]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("pytest_generate_tests", GUARD, "subject"):
            if name in vars(cls) and cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
                raise TypeError(f"{cls.__qualname__}.{name} belongs to the kit and cannot be replaced")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each law its cases; a law without any becomes one skipped test that says why."""
        if "case" in metafunc.fixturenames:
            law = law_of(type(self), metafunc.definition.originalname or metafunc.definition.name)
            cases, why = law.applicable(self.subject().cases)
            skipped = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=why))]
            metafunc.parametrize("case", [pytest.param(case, id=case.label) for case in cases] or skipped)
        elif "subject" in metafunc.fixturenames:
            metafunc.parametrize("subject", [self.subject()], ids=["all"])

    @pytest.fixture(autouse=True)
    def _named_in_reports(self, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
        test = getattr(request.node, "originalname", GUARD)
        if test != GUARD and (name := self.reported()):
            record_property("law", json.dumps({"mechanism": name, "law": law_of(type(self), test).title()}))

    @classmethod
    def reported(cls) -> str:
        """The mechanism under whose name reports count the laws that passed; empty for what is none."""
        return ""

    def test_no_law_is_dropped_or_replaced(self) -> None:
        """Deviations are overrides marked `xfail` with a reason, which call the law; nothing else is admitted."""
        found = tampering(type(self))
        if found:
            raise LawBroken("; ".join(found))


GUARD = "test_no_law_is_dropped_or_replaced"


def law_of(cls: type, test: str) -> type[Law]:
    """The law that defines the test of this name."""
    for base in cls.__mro__:
        if base is not cls and issubclass(base, Law) and test in base.checks() and not issubclass(base, Suite):
            return base
    raise LookupError(f"{cls.__qualname__}.{test} takes a case, but no law defines it")


def tampering(cls: type[Suite]) -> list[str]:
    """Every law of the suite that `cls` drops, replaces or skips without an `xfail` that has a reason."""
    found = [f"{law.title()} is not inherited" for law in cls.laws if not issubclass(cls, law)]
    found += [f"the class is marked {mark.name}" for mark in marks(cls) if mark.name in {"skip", "skipif", "xfail"}]
    for law in [base for base in cls.__mro__ if issubclass(base, Law) and not issubclass(base, Suite)]:
        for test in law.checks():
            own = getattr(cls, test, None)
            if own is not getattr(law, test) and not excused(own):
                found.append(f"{test} ({law.title()}) is replaced without an xfail that has a reason")
    return found


def excused(test: Any) -> bool:
    """Whether an overriding test is marked `xfail`, not to be left unrun, with a reason."""
    admitted = [m for m in marks(test) if m.name == "xfail" and m.kwargs.get("reason") and m.kwargs.get("run", True)]
    return bool(admitted) and not any(mark.name in {"skip", "skipif"} for mark in marks(test))


def marks(item: Any) -> list[pytest.Mark]:
    """The marks on a class or function."""
    found = getattr(item, "pytestmark", [])
    return [
        mark.mark if isinstance(mark, pytest.MarkDecorator) else mark
        for mark in (found if isinstance(found, list) else [found])
    ]
