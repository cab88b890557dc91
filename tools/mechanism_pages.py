"""A page for each mechanism of this tree, made from what the mechanism itself declares.

    python tools/mechanism_pages.py           write docs/mechanisms/*.md anew
    python tools/mechanism_pages.py --check   fail if they are not up to date

Prices are of one layer at one size, the same for all, so that pages can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING
from enum import Enum
from typing import Any

import proof_page
import proof_records
import workspace
from attn_cli.facts import verdicts, weights_statement
from attn_cli.pictures import as_text, view_of
from attn_core import Capability, Mechanism, MechanismConfig, Shape, configure, installed, state_bytes
from attn_core.computation import WholeCall
from attn_core.options import option_fields

FOLDER = workspace.ROOT / "docs" / "mechanisms"
NOTE = "<!-- Written by `python tools/mechanism_pages.py`; change the mechanism, not this page. -->\n"
WIDTH, HEADS, TOKENS = 512, 8, 1024
SEEN = 16
"""Positions on a side of the picture."""
GROUPS = {"gqa": 2}
"""Key/value heads of the mechanisms whose character that is; the others have as many as heads."""


def pages() -> dict[str, str]:
    """Every page by its file name, with the index."""
    mechanisms = installed().mechanisms
    local = [mechanisms.get(name) for name in mechanisms.names() if mechanisms.owner(name) in workspace.packages()]
    return {"README.md": index(local)} | {f"{mechanism.name}.md": page(mechanism) for mechanism in local}


def index(mechanisms: list[Mechanism]) -> str:
    """The table of all mechanisms."""
    rows = [f"| [{m.name}]({m.name}.md) | {m.summary} | {m.paper.authors}, {m.paper.year} |" for m in mechanisms]
    head = ["# Mechanisms", "", "| name | what it is | paper |", "|---|---|---|"]
    return NOTE + "\n".join([*head, *rows]) + "\n"


def page(mechanism: Mechanism) -> str:
    """The page of one mechanism."""
    config = example(mechanism)
    paper = mechanism.paper
    title = f"[{paper.title}]({paper.url})" if paper.url else paper.title
    summary = f"{mechanism.summary[:1].upper()}{mechanism.summary[1:]}."
    owner = installed().mechanisms.owner(mechanism.name)
    parts = [
        f"# {mechanism.name}",
        f"{summary} {paper.authors}, {paper.year}: {title}. In `{owner}`.",
        f"$$\n{mechanism.equation}\n$$",
        "## Options\n\n" + options(mechanism),
        "## What it can do\n\n" + capabilities(mechanism),
        "## Price\n\n" + price(mechanism, config),
        "## Weights\n\n" + f"{weights_statement(mechanism)[:1].upper()}{weights_statement(mechanism)[1:]}.",
    ]
    parts.append("## Kernels\n\n" + kernels(mechanism, config))
    parts.append("## Picture\n\n" + picture(mechanism))
    parts.append("## Proof\n\n" + proof_page.section(mechanism.name, proof_records.load()))
    return NOTE + "\n\n".join(parts) + "\n"


def example(mechanism: Mechanism, options: Mapping[str, Any] | None = None) -> MechanismConfig:
    """The sizes that every page shows, with its own options by default or as given."""
    causal, groups = mechanism.can(Capability.CAUSAL), GROUPS.get(mechanism.name)
    return configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, causal=causal, num_kv_heads=groups)


def options(mechanism: Mechanism) -> str:
    """Its own options; those of every mechanism (width, heads, ...) are not repeated."""
    fields = option_fields(mechanism)
    if not fields:
        return "None of its own."
    rows = [f"| `{name}` | {'required' if value is MISSING else f'`{value!r}`'} |" for name, value in fields.items()]
    return "\n".join(["| option | default |", "|---|---|", *rows])


def capabilities(mechanism: Mechanism) -> str:
    """Every capability there is, and whether it has it."""
    rows = [f"| {words(c)} | {'yes' if c in mechanism.capabilities else 'no'} |" for c in Capability]
    return "\n".join(["| | |", "|---|---|", *rows])


def words(member: Enum) -> str:
    """`RETURNS_WEIGHTS` as a reader would write it."""
    return member.name.lower().replace("_", " ")


def price(mechanism: Mechanism, config: MechanismConfig) -> str:
    """What one layer computes and remembers for one sequence."""
    cost = mechanism.cost(config, Shape(batch=1, query=TOKENS, key=TOKENS))
    states = mechanism.state(config)
    kinds = ", ".join(f"{name} ({type(spec).__name__.lower()})" for name, spec in states.items()) or "nothing"
    remembered = state_bytes(states, tokens=TOKENS, source=TOKENS, dtype="float32")
    rows = [
        ("floating-point operations", f"{cost.flops:,}"),
        ("of these for allowed pairs", f"{cost.allowed_flops:,}"),
        ("parameters", f"{cost.parameters:,}"),
        ("remembered", kinds),
        ("bytes of it, float32", f"{remembered:,}"),
    ]
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    return f"One layer of width {WIDTH} with {HEADS} heads, one sequence of {TOKENS} tokens.\n\n{table}"


def kernels(mechanism: Mechanism, config: MechanismConfig) -> str:
    """Which kernel computes it on a CPU in float32, and why the others refuse."""
    rows = verdicts(mechanism, config, WholeCall(dtype="float32", tokens=TOKENS))
    table = "\n".join(
        f"| {row['part']} | {row['name']} | {row['verdict']} | {row['reasons'].replace('|', '/')} |" for row in rows
    )
    return f"On a CPU in float32, {TOKENS} tokens.\n\n| computes | | | |\n|---|---|---|---|\n{table}"


def picture(mechanism: Mechanism) -> str:
    """What `attn show` draws, over as many positions as a page has room for."""
    view = view_of(mechanism, example(mechanism, mechanism.sketch), SEEN, mechanism.sketch)
    return f"{view.caption[:1].upper()}{view.caption[1:]}.\n\n```text\n{as_text(view.grid)}\n```"


def main() -> None:
    """Write the pages, or compare with them."""
    wanted = {FOLDER / name: text for name, text in pages().items()}
    present = {path: path.read_text("utf-8") for path in FOLDER.glob("*.md")}
    if "--check" in sys.argv[1:]:
        stale = sorted(path.name for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))
        raise SystemExit(f"not up to date, run python tools/mechanism_pages.py: {', '.join(stale)}" if stale else 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in present.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
