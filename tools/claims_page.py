"""Writes docs/claims.md: claims of papers and courses, the verdicts on them, and the tests and commands that show them.

    python tools/claims_page.py           write the page anew
    python tools/claims_page.py --check   fail if it is not up to date

The page is made from the registry, attn_experiments/claims.toml, and the tests with a claim's number in their names.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict

import sources
import workspace
from attn_experiments.claims import Claim, claims
from attn_experiments.report import VERDICTS

PAGE = workspace.ROOT / "docs" / "claims.md"
NUMBERED = re.compile(r"test_cl_(\d+)_\w+")
INTRODUCTION = """\
<!-- Written by `python tools/claims_page.py` from attn_experiments/claims.toml and the names of the tests. -->
# Claims

Papers and courses on attention make statements that can be computed. The table says what is claimed, what holds here,
and what shows it: tests that carry the number, so that `pytest -k cl_24` runs those of CL-24, and experiments, which
`attn reproduce CL-4` runs on this machine; in brackets, how often the verdict was found with other seeds, by `attn
reproduce CL-4 --repeat 10` or runs of one seed. `attn reproduce` says how each is measured and how long that takes.
*Holds in part* says that a part of the statement is true, or that it is under a condition which the statement leaves
out; *not measured* that it needs machines or data which are not here. Where a formula is printed wrongly, see
[errata.md](errata.md).
"""


def numbered_tests() -> dict[int, list[str]]:
    """The tests that have the number of a claim in their names, as path#function, in order of path."""
    found: dict[int, list[str]] = defaultdict(list)
    for source in sources.of_tests():
        for name, _ in source.functions():
            if carried := NUMBERED.fullmatch(name):
                found[int(carried[1])].append(f"{source.path}#{name}")
    return found


def linked(test: str) -> str:
    """A Markdown link to a test, with its name as words."""
    name = test.rpartition("#")[2]
    return f"[{re.sub(r'^test_(cl_[0-9]+_)?', '', name).replace('_', ' ')}](../{test})"


def row(claim: Claim, tests: list[str]) -> str:
    """The table row of one claim."""
    shown = []
    if claim.experiment is not None:
        repeated = f" ({claim.experiment.repeated})" if claim.experiment.repeated else ""
        shown = [f"`attn reproduce {claim.name}`{repeated}"]
    shown += [linked(test) for test in [*tests, *claim.tests]]
    return f"| {claim.name} | {claim.said} | {claim.verdict} | {claim.holds} | {'<br>'.join(shown)} |"


def page() -> str:
    """The whole page."""
    tests, counted = numbered_tests(), Counter(claim.verdict for claim in claims().values())
    total = ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS)
    head = ["| claim | what is said | verdict | what holds | shown by |", "|---" * 5 + "|"]
    rows = [row(claim, tests.get(claim.number, [])) for claim in claims().values()]
    return f"{INTRODUCTION}\nOf {len(claims())} claims: {total}.\n\n" + "\n".join([*head, *rows]) + "\n"


def main() -> None:
    """Write the page, or with --check compare it."""
    if "--check" in sys.argv[1:]:
        same = PAGE.read_text("utf-8") == page()
        raise SystemExit(0 if same else "docs/claims.md is not up to date: run python tools/claims_page.py")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
