"""Writes docs/proof.md: how each mechanism was verified, from the results that tests recorded in docs/proof.json.

    python tools/proof.py                     write the page anew
    python tools/proof.py --check             fail if it is not up to date
    python tools/proof.py record REPORT.xml   first record the results of a test run (pytest --junitxml)

Tests record results with `attn_testing.Agreement`; the kit's laws record theirs themselves. `nox -s proof` runs all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import proof_page
import proof_records
from proof_records import Proof


def main() -> None:
    """Record reports if given, then write the page, or with --check compare it."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["record"]:
        proof = proof_records.load() if proof_records.DATA.exists() else Proof(comparisons=[], laws=[])
        for report in arguments[1:]:
            proof = proof_records.merged(proof, proof_records.read(Path(report)))
        proof_records.save(proof)
    text = proof_page.page(proof_records.load())
    if "--check" in arguments:
        same = proof_page.PAGE.read_text("utf-8") == text
        raise SystemExit(0 if same else "docs/proof.md is not up to date: run python tools/proof.py")
    proof_page.PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
