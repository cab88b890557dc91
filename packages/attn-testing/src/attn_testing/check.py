"""Checks laws without pytest, for the command line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core import Mechanism
from attn_core.errors import UserError

from attn_testing.law import Law
from attn_testing.laws import MECHANISM_LAWS
from attn_testing.subject import Subject


@dataclass(frozen=True, kw_only=True)
class LawResult:
    """The result of one law. `applied` is False if the law does not apply to the subject.

    `detail` then says why; if the law is broken, it names the first failing case and the error.
    """

    law: str
    summary: str
    passed: bool
    applied: bool
    detail: str


def check(
    mechanism: str | Mechanism,
    options: Mapping[str, Any] | None = None,
    *,
    tokens: int | None = None,
    every_case: bool = False,
) -> list[LawResult]:
    """Check every law for a mechanism, given by name or as an object, with its `options`.

    `tokens` is the length of the longest sequences that the mechanism is tested with, by default what its options
    need (see `Subject`). A law is checked in cases that together have every mode, size and feature that it applies to
    (`Law.covering`); with `every_case`, in all combinations that are tried. Raises `InvalidValue` if `tokens` is too
    small, `UnknownName` if there is no such mechanism, and the first error of `options` that every setting refuses.
    Broken laws are in the results and never raised.
    """
    subject = Subject(mechanism, options or {}, tokens=tokens)
    refused = subject.refusals if options and not subject.cases else []
    for error in [each.error for each in refused if isinstance(each.error, UserError)]:
        raise error
    return [judge(law, subject, every_case=every_case) for law in MECHANISM_LAWS]


def judge(law: type[Law], subject: Any, *, every_case: bool = True) -> LawResult:
    """Check one law for a subject with `cases`: for every one, or those that cover them."""
    summary = (inspect.getdoc(law) or "").partition("\n")[0]

    def result(detail: str = "", *, passed: bool = True, applied: bool = True) -> LawResult:
        return LawResult(law=law.title(), summary=summary, passed=passed, applied=applied, detail=detail)

    cases, why = law.applicable(subject.cases)
    cases = cases if every_case else law.covering(cases)
    instance: Any = law()
    whole = [test for test in law.checks() if "subject" in inspect.signature(getattr(law, test)).parameters]
    each = [test for test in law.checks() if test not in whole]
    if not cases and not whole:
        return result(why, applied=False)
    for test, label, given in [(t, "", subject) for t in whole] + [(t, f"{c.label}: ", c) for c in cases for t in each]:
        try:
            getattr(instance, test)(given)
        except Exception as error:  # noqa: BLE001  # a mechanism may raise anything; that too is a broken law
            return result(f"{label}{type(error).__name__}: {error}", passed=False)
    return result(f"{len(cases)} cases")
