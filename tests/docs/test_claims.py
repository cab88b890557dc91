"""docs/claims.md names tests that exist, and every test that carries the number of a claim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sources

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "claims.md"
ROW = re.compile(r"^\| CL-(\d+) \|.*\|$", re.MULTILINE)
NUMBERED = re.compile(r"test_cl_(\d+)_\w+")
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([\w./-]+\.py)#(test_\w+)\)")


def named() -> list[tuple[str, str, str, str]]:
    """Claim, words, file and test of every link in the table."""
    rows = [(row[1], row[0]) for row in ROW.finditer(PAGE.read_text("utf-8"))]
    return [(claim, *link.groups()) for claim, row in rows for link in LINK.finditer(row)]


@pytest.mark.parametrize(("claim", "words", "path", "test"), named())
def test_every_test_of_the_table_exists_under_the_words_it_is_linked_by(
    claim: str, words: str, path: str, test: str
) -> None:
    assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE), f"CL-{claim}"
    assert test.endswith(words.replace(" ", "_"))


def test_every_test_that_carries_the_number_of_a_claim_is_in_the_table() -> None:
    listed = {(claim, test) for claim, _, _, test in named()}
    functions = [name for source in sources.of_tests() for name, _ in source.functions()]
    carried = {(found[1], found[0]) for found in map(NUMBERED.fullmatch, functions) if found}
    assert len(carried) > 50
    assert carried <= listed, sorted(carried - listed)
