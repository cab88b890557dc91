"""Writes a page for each mechanism of this tree, from what the mechanism itself declares.

    python tools/mechanism_pages.py           write docs/mechanisms/*.md anew
    python tools/mechanism_pages.py --check   fail if they are not up to date

Costs are those of one layer, at the same size for all mechanisms, so that pages can be compared.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import MISSING
from enum import Enum
from typing import Any

import proof_page
import proof_records
import workspace
from attn_cli.facts import by_use, padding_statement, verdicts, weights_statement
from attn_cli.pictures import as_text, view_of
from attn_core import Capability, Mechanism, MechanismConfig, Shape, configure, installed, state_bytes
from attn_core.computation import WholeCall
from attn_core.errors import AttnError
from attn_core.options import option_fields

FOLDER = workspace.ROOT / "docs" / "mechanisms"
NOTE = "<!-- Written by `python tools/mechanism_pages.py`; change the mechanism, not this page. -->\n"
WIDTH, HEADS, TOKENS = 512, 8, 1024
SEEN = 16
"""The number of positions along each side of the picture."""
GROUPS = {"gqa": 2}
"""The number of key/value heads of mechanisms that are defined by it; the others have one for each query head."""


def pages() -> dict[str, str]:
    """The text of every page by file name, including the index."""
    mechanisms = installed().mechanisms
    local = [mechanisms.get(name) for name in mechanisms.names() if mechanisms.owner(name) in workspace.packages()]
    return {"README.md": index(local)} | {f"{mechanism.name}.md": page(mechanism) for mechanism in local}


def index(mechanisms: list[Mechanism]) -> str:
    """The index page: a table of all mechanisms."""
    found = by_use(mechanisms)
    rows = [f"| [{m.name}]({m.name}.md) | {m.summary} | {m.paper.authors}, {m.paper.year} |" for m in found]
    head = ["# Mechanisms", "", "| name | what it is | paper |", "|---|---|---|"]
    return NOTE + "\n".join([*head, *rows]) + "\n"


def page(mechanism: Mechanism) -> str:
    """The page of one mechanism."""
    config = example(mechanism)
    paper = mechanism.paper
    title = f"[{paper.title}]({paper.url})" if paper.url else paper.title
    summary = f"{mechanism.summary[:1].upper()}{mechanism.summary[1:]}."
    owner = installed().mechanisms.owner(mechanism.name)
    used = f" In {', '.join(mechanism.used_by)}." if mechanism.used_by else ""
    parts = [
        f"# {mechanism.name}",
        f"{summary} {paper.authors}, {paper.year}: {title}. Package `{owner}`.{used}",
        f"$$\n{mechanism.equation}\n$$",
        *explained(mechanism),
        "## Run it\n\n" + example_code(mechanism),
        "## Picture\n\n" + picture(mechanism),
        "## Options\n\n" + options(mechanism),
        "## What it can do\n\n" + capabilities(mechanism, config),
        "## Price\n\n" + price(mechanism, config),
        "## Weights\n\n" + f"{weights_statement(mechanism)[:1].upper()}{weights_statement(mechanism)[1:]}.",
    ]
    parts.append("## Kernels\n\n" + kernels(mechanism, config))
    parts.append("## Proof\n\n" + proof_page.section(mechanism.name, proof_records.load()))
    return NOTE + "\n\n".join(parts) + "\n"


def example(mechanism: Mechanism, options: Mapping[str, Any] | None = None) -> MechanismConfig:
    """The mechanism's config at the size that all pages use, with default options or those given."""
    causal, groups = mechanism.can(Capability.CAUSAL), GROUPS.get(mechanism.name)
    return configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, causal=causal, num_kv_heads=groups)


def options(mechanism: Mechanism) -> str:
    """The table of the mechanism's own options, without those that every mechanism has (width, heads, ...)."""
    fields = option_fields(mechanism)
    if not fields:
        return "None of its own."
    rows = [
        f"| `{name}` | {'required' if value is MISSING else f'`{value!r}`'} | {allowed(mechanism, name)} |"
        for name, value in fields.items()
    ]
    table = "\n".join(["| option | default | allowed |", "|---|---|---|", *rows])
    return f"{table}\n\n{meanings(mechanism)}"


def explained(mechanism: Mechanism) -> list[str]:
    """The sections on the idea and when to use it, if the mechanism declares them."""
    if not mechanism.idea:
        return []
    *idea, use = mechanism.idea
    return ["## The idea", *idea, "## When to use it", use]


def example_code(mechanism: Mechanism) -> str:
    """Example code that builds a small layer and runs it, and the commands that show more."""
    given = dict(mechanism.sketch)
    shared = "hidden_size=64, num_heads=4" + (", num_kv_heads=2" if mechanism.name in GROUPS else "")
    cross = mechanism.only_cross
    arguments = "rows, source" if cross else "rows"
    lines = [
        "import torch",
        "from attn_core import configure, installed",
        "",
        f'mechanism = installed().mechanisms.get("{mechanism.name}")',
        f"layer = mechanism.build(configure(mechanism, {given}, {shared}))",
        "rows = torch.randn(2, 12, 64)  # [batch, tokens, hidden_size]",
        *(["source = torch.randn(2, 9, 64)  # what an encoder read"] if cross else []),
        f"out = layer({arguments})",
        "assert out.shape == rows.shape",
    ]
    if mechanism.can(Capability.WEIGHTS):
        lines += [f"print(layer.weights({arguments})[0, 0])  # of the first head: a row per query, a column per key"]
    commands = [f"attn show {mechanism.name}", f"attn explain {mechanism.name}", f"attn check {mechanism.name}"]
    if mechanism.can(Capability.CAUSAL):
        commands.append(f"attn train --mechanism {mechanism.name} --dataset shakespeare")
    code, shell = "\n".join(lines), "\n".join(commands)
    return f"```python\n{code}\n```\n\n```bash\n{shell}\n```"


GENERIC = ("of 64 bits", "text", "a finite number", "a list", "an object")
"""Parts of error messages for values of a wrong type, which tell less than those for wrong values of the right type."""
WRONG = (-(10**9), -0.5, 2.5, "no such word", (-1,), object())


def allowed(mechanism: Mechanism, option: str) -> str:
    """The allowed values of an option, taken from the error messages for wrong values."""
    said = []
    for value in WRONG:
        try:
            configure(mechanism, {option: value}, hidden_size=WIDTH, num_heads=HEADS)
        except AttnError as error:
            if error.metadata.get("field") == option and "allowed" in error.metadata:
                said.append(str(error.metadata["allowed"]))
    told = [text for text in said if not any(word in text for word in GENERIC)] or said
    return told[0].replace("|", "/") if told else ""


def meanings(mechanism: Mechanism) -> str:
    """The meaning of the options: the docstrings of the config that declares them and of its base configs."""
    texts = [
        inspect.cleandoc(kind.__doc__ or "")
        for kind in mechanism.Config.__mro__
        if issubclass(kind, MechanismConfig) and kind is not MechanismConfig and "__doc__" in vars(kind)
    ]
    return "\n\n".join(dict.fromkeys(text for text in texts if text))


def capabilities(mechanism: Mechanism, config: MechanismConfig) -> str:
    """A table of all capabilities, and whether the mechanism has them; and what padding does."""
    rows = [f"| {words(c)} | {'yes' if c in mechanism.capabilities else 'no'} |" for c in Capability]
    padding = f"Padding: {padding_statement(mechanism, config)}."
    return "\n".join(["| | |", "|---|---|", *rows]) + f"\n\n{padding}"


def words(member: Enum) -> str:
    """The name of an enumeration member as words: "returns weights" for `RETURNS_WEIGHTS`."""
    return member.name.lower().replace("_", " ")


def price(mechanism: Mechanism, config: MechanismConfig) -> str:
    """A table of the FLOPs, parameters and decoding state of one layer for one sequence."""
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
    """A table of the kernels: which one computes the mechanism on a CPU in float32, and why the others do not."""
    rows = verdicts(mechanism, config, WholeCall(dtype="float32", tokens=TOKENS))
    table = "\n".join(
        f"| {row['part']} | {row['name']} | {row['verdict']} | {row['reasons'].replace('|', '/')} |" for row in rows
    )
    return f"On a CPU in float32, {TOKENS} tokens.\n\n| computes | | | |\n|---|---|---|---|\n{table}"


def picture(mechanism: Mechanism) -> str:
    """The picture that `attn show` draws, over `SEEN` positions."""
    view = view_of(mechanism, example(mechanism, mechanism.sketch), SEEN, mechanism.sketch)
    return f"{view.caption[:1].upper()}{view.caption[1:]}.\n\n```text\n{as_text(view.grid)}\n```"


def main() -> None:
    """Write the pages, or with --check compare them."""
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
