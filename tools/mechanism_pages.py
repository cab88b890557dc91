"""A page for each mechanism of this tree, made from what the mechanism itself declares.

    python tools/mechanism_pages.py           write docs/mechanisms/*.md anew
    python tools/mechanism_pages.py --check   fail if they are not up to date

Prices are of one layer at one size, the same for all, so that pages can be compared.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING
from enum import Enum

import proof_page
import proof_records
import workspace
from attn_cli.facts import verdicts, weights_statement
from attn_core import (
    AttentionSpec,
    Capability,
    Mask,
    Mechanism,
    MechanismConfig,
    Shape,
    WholeCall,
    configure,
    installed,
    option_fields,
    state_bytes,
)

FOLDER = workspace.ROOT / "docs" / "mechanisms"
NOTE = "<!-- Written by `python tools/mechanism_pages.py`; change the mechanism, not this page. -->\n"
WIDTH, HEADS, TOKENS = 512, 8, 1024
SEEN = 16
"""Positions on a side of the picture of a mask."""
SMALLER = {"window": 4, "key_value_heads": 2}
"""What is set for the picture and the price where a mechanism has it; at the default its mask would look full."""


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
    spec = mechanism.spec(config)
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
    if spec is not None:
        parts.append("## Mask\n\n" + mask_text(spec, config))
    parts.append("## Proof\n\n" + proof_page.section(mechanism.name, proof_records.load()))
    return NOTE + "\n\n".join(parts) + "\n"


def example(mechanism: Mechanism) -> MechanismConfig:
    """The sizes that every page shows, with what would otherwise hide the mechanism's character made small."""
    own = {name: value for name, value in SMALLER.items() if name in option_fields(mechanism)}
    shared = {"key_value_heads": SMALLER["key_value_heads"]} if mechanism.name == "gqa" else {}
    causal = Capability.CAUSAL in mechanism.capabilities
    return configure(mechanism, own, width=WIDTH, heads=HEADS, causal=causal, **shared)


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


def mask_text(spec: AttentionSpec, config: MechanismConfig) -> str:
    """The picture with the settings it was drawn for."""
    shown = {name: getattr(config, name) for name in SMALLER if getattr(config, name, None) is not None}
    settings = f" ({', '.join(f'{name}={value}' for name, value in shown.items())})" if shown else ""
    return f"A row per query, a column per key; `■` is seen{settings}.\n\n```text\n{picture(spec.mask)}\n```"


def picture(mask: Mask) -> str:
    """The mask over the first positions, a line per query; of a mask that differs by head the first head's."""
    rows, first = range(SEEN), mask.over(SEEN).of_head(0)
    return "\n".join(" ".join("■" if first.allows(query, key) else "·" for key in rows) for query in rows)


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
