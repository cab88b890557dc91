"""The registry of claims: what papers and courses say of attention, what holds, and how it is measured.

`claims.toml` is the one place; docs/claims.md, `attn reproduce` and the tests of both are made from it.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

from attn_core.errors import InvalidValue, UnknownName

from attn_experiments.report import VERDICTS, Result, Settings, Verdict


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """How a claim is measured, about how many minutes of one core that takes, and "module:function" that does it."""

    measured: str
    minutes: float
    target: str

    def load(self) -> Callable[[Settings], Result]:
        """The function, imported now."""
        module, _, name = self.target.partition(":")
        return cast("Callable[[Settings], Result]", getattr(importlib.import_module(module), name))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of the literature.

    `said` is the statement, `holds` what is true of it here; `tests` are those of it that do not carry its number, as
    "path#function"; `experiment` measures it, where it needs more than a test.
    """

    number: int
    said: str
    holds: str
    verdict: Verdict
    tests: tuple[str, ...] = ()
    experiment: Experiment | None = None

    @property
    def name(self) -> str:
        """As the literature of this project numbers it: CL-4."""
        return f"CL-{self.number}"


@cache
def claims() -> Mapping[int, Claim]:
    """All claims by number, in order; raises `InvalidValue` for a verdict that there is not."""
    found = tomllib.loads((files("attn_experiments") / "claims.toml").read_text("utf-8"))["claim"]
    return {claim.number: claim for claim in sorted(map(claim_of, found), key=lambda claim: claim.number)}


def claim_of(entry: Mapping[str, Any]) -> Claim:
    """A claim from its entry in the file."""
    if entry["verdict"] not in VERDICTS:
        raise InvalidValue.of(f"verdict of claim {entry['number']}", entry["verdict"], ", ".join(VERDICTS))
    experiment = Experiment(**entry["experiment"]) if "experiment" in entry else None
    own = {**entry, "tests": tuple(entry.get("tests", ())), "experiment": experiment}
    return Claim(**own)


def claim(name: str) -> Claim:
    """The claim called CL-4, cl-4 or 4; raises `UnknownName`."""
    known = {found.name: found for found in claims().values()}
    number = name.upper().removeprefix("CL").removeprefix("-")
    if f"CL-{number}" not in known:
        raise UnknownName.of("claim", name, list(known))
    return known[f"CL-{number}"]
