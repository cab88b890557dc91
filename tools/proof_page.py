"""The text of docs/proof.md, and of the section "Proof" on each mechanism's page."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import workspace
from attn_core import installed
from attn_testing.laws import MECHANISM_LAWS
from proof_records import Comparison, Laws, Proof

PAGE = workspace.ROOT / "docs" / "proof.md"
NOTE = "<!-- Written by `python tools/proof.py` from docs/proof.json, which `nox -s proof` records. -->\n"
KINDS = {
    "package": "an independent implementation",
    "paper": "the paper's equations, written out in float64",
    "parts": "the definitions of the parts that its own spec names",
    "identity": "a limit in which it must equal another mechanism",
}
INTRODUCTION = """\
# Proof

Each mechanism is compared with results that this project did not compute with its own code, and must keep every law
of the conformance kit that its capabilities let apply. This table is made from what the tests recorded, so it says what
ran and passed: `nox -s proof` runs them in an environment with all oracles, and writes it anew.

An error is the largest |ours - theirs| / (1 + |theirs|) over all elements of all cases of that kind, in float64 unless
said otherwise; "-" means that it was not compared. Oracles that compute in float32 inside leave errors of that size.
*Package* is another implementation, called with the same weights; *paper* the equations, written out slowly in the
tests from the weights alone, or numbers that a paper prints; *limit* a setting in which the mechanism must equal
another one. *Parts*: a mechanism that is declared as a spec is also computed from that spec, pair by pair, by the
definitions of its parts (`attn_testing.oracle`). That proves what computes specs, not that the spec is the paper's, for
it reads the spec and its mask. Gradients that were compared with nothing are still checked by finite
differences, which is a law. Formulas that courses print otherwise are in [errata.md](errata.md).
"""


def page(proof: Proof) -> str:
    """The whole page."""
    names = local_mechanisms()
    rows = [row(name, proof) for name in names]
    head = [
        "| mechanism | package | outputs | gradients | paper | outputs | gradients | parts | limit | laws |",
        "|---" * 10 + "|",
    ]
    table = "\n".join([*head, *rows])
    return NOTE + f"{INTRODUCTION}\n{table}\n\n## What is missing\n\n{missing(names, proof)}\n\n{laws_text()}\n"


def section(name: str, proof: Proof) -> str:
    """The section of one mechanism: what it was compared with, and the laws that it passed."""
    found = sorted(
        {(c.kind, c.oracle) for c in proof.comparisons if c.mechanism == name},
        key=lambda f: (list(KINDS).index(f[0]), f),
    )
    if not found:
        return "Nothing is recorded: run `nox -s proof`."
    lines = ["| compared with | | outputs | gradients |", "|---|---|---|---|"]
    for kind, oracle in found:
        own = [c for c in proof.comparisons if (c.mechanism, c.kind, c.oracle) == (name, kind, oracle)]
        cells = [oracle, KINDS[kind], worst(own, outputs_of), worst(own, gradients_of)]
        lines.append("| " + " | ".join(cells) + " |")
    passed, silent = laws_of(name, proof.laws)
    kept = f"Laws kept: {', '.join(map(words, passed)) or 'none is recorded'}."
    quiet = [f"- {words(law)}: {reason}" for law, reason in silent.items()]
    said = "\n\nLaws that say nothing here:\n\n" + "\n".join(quiet) if quiet else ""
    return "\n".join(lines) + f"\n\nThe largest errors, relative to 1 + |theirs|. {kept}{said}"


def row(name: str, proof: Proof) -> str:
    """The table row of one mechanism."""
    cells = [f"[{name}](mechanisms/{name}.md)"]
    for kind in KINDS:
        own = [c for c in proof.comparisons if c.mechanism == name and c.kind == kind]
        if kind == "parts":
            cells.append(worst(own, outputs_of))
            continue
        cells.append("; ".join(sorted({c.oracle for c in own})) or "none")
        if kind != "identity":
            cells += [worst(own, outputs_of), worst(own, gradients_of)]
    passed, silent = laws_of(name, proof.laws)
    cells.append(f"{len(passed)} kept" + (f", {len(silent)} silent" if silent else ""))
    return "| " + " | ".join(cells) + " |"


def missing(names: list[str], proof: Proof) -> str:
    """A list of the mechanisms that lack each kind of proof."""
    by_kind = {kind: {c.mechanism for c in proof.comparisons if c.kind == kind} for kind in KINDS}
    graded = {c.mechanism for c in proof.comparisons if c.gradients is not None and c.kind in {"package", "paper"}}
    independent = by_kind["package"] | by_kind["paper"]
    gaps = {
        "Compared with no package": set(names) - by_kind["package"],
        "Compared with neither package nor paper": set(names) - independent,
        "Gradients compared with neither package nor paper": set(names) - graded,
        "No law recorded": set(names) - {entry.mechanism for entry in proof.laws},
    }
    return "\n".join(f"- {what}: {', '.join(sorted(who)) or 'none'}." for what, who in gaps.items())


def laws_text() -> str:
    """The section that lists all laws."""
    listed = [f"- {words(law.title())}: {(law.__doc__ or '').partition(chr(10))[0]}" for law in MECHANISM_LAWS]
    return "## The laws\n\n" + "\n".join(listed)


def laws_of(name: str, entries: Iterable[Laws]) -> tuple[list[str], dict[str, str]]:
    """The laws that a mechanism passed in any of its settings, and the reasons why the others do not apply."""
    own = [entry for entry in entries if entry.mechanism == name]
    passed = {law for entry in own for law in entry.passed}
    silent = {law: reason for entry in own for law, reason in entry.silent.items() if law not in passed}
    order = [law.title() for law in MECHANISM_LAWS]
    return [law for law in order if law in passed], {law: silent[law] for law in order if law in silent}


def local_mechanisms() -> list[str]:
    """The names of the mechanisms that packages of this tree provide."""
    mechanisms = installed().mechanisms
    return [name for name in mechanisms.names() if mechanisms.owner(name) in workspace.packages()]


def outputs_of(found: Comparison) -> float | None:
    """The error of the outputs."""
    return found.outputs


def gradients_of(found: Comparison) -> float | None:
    """The error of the gradients."""
    return found.gradients


def worst(found: list[Comparison], part: Callable[[Comparison], float | None]) -> str:
    """The largest error as text, with the dtype of the computation unless that is float64 or int64."""
    errors = [(error, c.dtype) for c in found if (error := part(c)) is not None]
    if not errors:
        return "-"
    error, dtype = max(errors)
    return f"{error:.0e}" + ("" if dtype in {"float64", "int64"} else f" ({dtype})") if error else "0"


def words(law: str) -> str:
    """The name of a law as words: "causality by gradient" for `causality_by_gradient`."""
    return law.replace("_", " ")
