"""The registry of claims that papers and courses make about attention, with verdicts and measurements.

`claims.toml` is the only source; docs/claims.md, `attn reproduce` and the tests of both are derived from it.
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
    """An experiment: how a claim is measured, the approximate minutes on one core, and the "module:function" to run.

    `repeated` says how often the verdict on record was found with other seeds.
    """

    measured: str
    minutes: float
    target: str
    repeated: str = ""

    def load(self) -> Callable[[Settings], Result]:
        """Import and return the experiment's function."""
        module, _, name = self.target.partition(":")
        return cast("Callable[[Settings], Result]", getattr(importlib.import_module(module), name))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the literature.

    `said` is the claim and `holds` what was found to be true of it; `tests` are the tests of it that do not have its
    number in their names, as "path#function"; `experiment` measures it, if a test is not enough.
    """

    number: int
    said: str
    holds: str
    verdict: Verdict
    tests: tuple[str, ...] = ()
    experiment: Experiment | None = None

    @property
    def name(self) -> str:
        """The name of the claim, such as CL-4."""
        return f"CL-{self.number}"


@cache
def claims() -> Mapping[int, Claim]:
    """All claims by number, in order; raises `InvalidValue` for an unknown verdict in the file."""
    found = tomllib.loads((files("attn_experiments") / "claims.toml").read_text("utf-8"))["claim"]
    return {claim.number: claim for claim in sorted(map(claim_of, found), key=lambda claim: claim.number)}


def claim_of(entry: Mapping[str, Any]) -> Claim:
    """Make a claim from its entry in `claims.toml`; raises `InvalidValue` for an unknown verdict."""
    if entry["verdict"] not in VERDICTS:
        raise InvalidValue.of(f"verdict of claim {entry['number']}", entry["verdict"], ", ".join(VERDICTS))
    experiment = Experiment(**entry["experiment"]) if "experiment" in entry else None
    own = {**entry, "tests": tuple(entry.get("tests", ())), "experiment": experiment}
    return Claim(**own)


def claim(name: str) -> Claim:
    """The claim of a name such as CL-4, cl-4 or 4; raises `UnknownName` if there is none."""
    known = {found.name: found for found in claims().values()}
    number = name.upper().removeprefix("CL").removeprefix("-")
    if f"CL-{number}" not in known:
        raise UnknownName.of("claim", name, list(known))
    return known[f"CL-{number}"]
