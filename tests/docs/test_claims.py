"""The registry of claims is whole, its experiments exist, and docs/claims.md is written from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import claims_page
import pytest
from attn_experiments.claims import Claim, claims

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def numbered() -> dict[int, list[str]]:
    return claims_page.numbered_tests()


def test_the_page_is_what_the_registry_says() -> None:
    assert claims_page.PAGE.read_text("utf-8") == claims_page.page(), "run python tools/claims_page.py"


def test_every_test_that_carries_the_number_of_a_claim_has_one(numbered: dict[int, list[str]]) -> None:
    assert len(numbered) > 40
    assert numbered.keys() <= claims().keys()


@pytest.mark.parametrize("claim", claims().values(), ids=lambda claim: claim.name)
def test_a_claim_is_shown_by_a_test_or_an_experiment_or_said_not_to_be_measured(
    claim: Claim, numbered: dict[int, list[str]]
) -> None:
    shown = bool(numbered.get(claim.number) or claim.tests or claim.experiment or "benchmarks/" in claim.holds)
    assert shown != (claim.verdict == "not measured")
    for path, _, name in (test.partition("#") for test in claim.tests):
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE), name


@pytest.mark.parametrize("claim", [claim for claim in claims().values() if claim.experiment], ids=lambda c: c.name)
def test_an_experiment_is_a_function_that_says_which_claim_it_measures(claim: Claim) -> None:
    assert claim.experiment is not None
    function: Callable[..., object] = claim.experiment.load()
    documented = f"{function.__doc__} {__import__(function.__module__, fromlist=['x']).__doc__}"
    assert re.search(rf"\b(CL-)?{claim.number}\b", documented), f"{function.__qualname__} does not name {claim.name}"
    assert 0 < claim.experiment.minutes <= 15
