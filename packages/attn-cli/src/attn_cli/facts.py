"""What is known of a mechanism before anything runs: what it says of itself, its price, its kernels."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

from attn_core import (
    Capability,
    Mechanism,
    MechanismConfig,
    RecurrenceKernel,
    Shape,
    Verdict,
    attend_problem,
    explain,
    installed,
    option_fields,
    paged_problem,
    recurrence_problem,
    state_bytes,
)
from attn_core.errors import InvalidValue

ROW_FORMS = ("plain", "int8", "int4", "latent")
"""How caches keep rows; see `attn_core.paged_problem`."""


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """What the mechanism says of itself."""
    paper = mechanism.paper
    options = {
        name: "required" if default is MISSING else default for name, default in option_fields(mechanism).items()
    }
    return {
        "name": mechanism.name,
        "summary": mechanism.summary,
        "package": installed().mechanisms.owner(mechanism.name),
        "paper": f"{paper.authors} ({paper.year}). {paper.title}. {paper.url or ''}".strip(),
        "equation": mechanism.equation,
        "capabilities": sorted(mechanism.capabilities),
        "options": options,
    }


def price(mechanism: Mechanism, config: MechanismConfig, tokens: int, dtype: str) -> dict[str, Any]:
    """What one layer remembers and costs for one sequence of `tokens` tokens."""
    states = mechanism.state(config)
    cost = mechanism.cost(config, Shape(batch=1, query=tokens, key=tokens))
    grown = state_bytes(states, tokens=tokens, source=tokens, dtype=dtype)
    shorter = state_bytes(states, tokens=tokens - 1, source=tokens - 1, dtype=dtype)
    return {
        "states": [f"{name}: {type(spec).__name__.lower()} {dict(spec.fields)}" for name, spec in states.items()],
        "tokens": tokens,
        "dtype": dtype,
        "state bytes": grown,
        "state bytes per token": grown - shorter,
        "flops": cost.flops,
        "allowed flops": cost.allowed_flops,
        "parameters": cost.parameters,
    }


def verdicts(mechanism: Mechanism, config: MechanismConfig, **problem: Any) -> list[dict[str, Any]]:
    """A row per kernel, the chosen one first; none where the mechanism computes its own way."""
    spec = mechanism.spec(config)
    if spec is None:
        return recurrence_verdicts(mechanism, config, **problem)
    return said(explain(installed().kernels, attend_problem(spec, **problem)))


def recurrence_verdicts(mechanism: Mechanism, config: MechanismConfig, **problem: Any) -> list[dict[str, Any]]:
    """A row per kernel that computes linear recurrences; none where the mechanism asks for no kernel."""
    asked = mechanism.recurrence(config)
    if asked is None:
        return []
    kernels = [kernel for kernel in installed().kernels if isinstance(kernel, RecurrenceKernel)]
    known = {name: problem[name] for name in ("dtype", "device", "gradients")}
    return said(explain(kernels, recurrence_problem(asked, **known, tokens=problem.get("queries", 0))))


def paged_verdicts(
    mechanism: Mechanism, config: MechanismConfig, *, dtype: str, device: str, rows: str
) -> list[dict[str, Any]]:
    """A row per kernel for a step over rows where a cache keeps them, in this form.

    Where all refuse, rows are gathered, and `verdicts` says who computes.
    """
    spec = mechanism.spec(config)
    if rows not in ROW_FORMS:
        raise InvalidValue.of("--rows", rows, ", ".join(ROW_FORMS))
    if spec is None:
        return []
    return said(explain(installed().kernels, paged_problem(spec, dtype=dtype, device=device, rows=rows)))


def said(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """The verdicts as rows of a table."""
    rows = []
    for place, verdict in enumerate(verdicts):
        word = "refuses" if not verdict.accepted else "runs" if place == 0 else "would accept"
        cost = "" if verdict.cost is None else f"{verdict.cost:g}"
        rows.append({"name": verdict.kernel.name, "verdict": word, "cost": cost, "reasons": "; ".join(verdict.reasons)})
    return rows


def weights_statement(mechanism: Mechanism) -> str:
    """Whether attention weights can be asked for, in a sentence."""
    if mechanism.can(Capability.WEIGHTS):
        return "on request, [batch, heads, query, key]"
    return "none: its output is not computed from a weight per pair of a query and a key"
