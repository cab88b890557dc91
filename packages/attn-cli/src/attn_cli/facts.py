"""Facts about a mechanism without running it: its description, the cost of a layer, and the kernels that compute it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import MISSING
from typing import Any

from attn_core import AttentionSpec, Capability, Mechanism, MechanismConfig, Rotary, Shape, installed, state_bytes
from attn_core.computation import Computation, WholeCall
from attn_core.errors import InvalidValue
from attn_core.graph_safety import ASKS_THE_HOST, REPLAYED, always_as_many, gathers, plans_on_the_host, state_reason
from attn_core.kernels.attend import PagedAttendKernel, paged_problem
from attn_core.kernels.base import Problem
from attn_core.kernels.dispatch import explain
from attn_core.kernels.recurrent_step import PLAIN
from attn_core.kernels.rowwise import ROW_FORMS, row_problem
from attn_core.options import option_fields
from attn_core.states import Paged, Slot, StateSpec

DECODE_STEP = "decode step"
"""The name in `attn explain` of a step in which each request computes one token."""

MIXED_STEP = "step with prompts"
"""The name in `attn explain` of a step in which some requests compute a prompt or a chunk of one."""

QUERY_LENGTHS = {DECODE_STEP: 1, MIXED_STEP: 2}
"""The number of tokens of a request from which on a step is of this kind."""

CACHE_FORMS = ("plain", "float16", "int8", "int4", "latent")
"""The forms in which caches store rows; see `attn_core.kernels.attend.paged_problem`."""


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """The mechanism's own description: name, summary, paper, equation, capabilities and options."""
    paper = mechanism.paper
    options = {
        name: "required" if default is MISSING else default for name, default in option_fields(mechanism).items()
    }
    return {
        "name": mechanism.name,
        "summary": mechanism.summary,
        "package": installed().mechanisms.owner(mechanism.name),
        "paper": f"{paper.cited}. {paper.title}. {paper.url or ''}".strip(". "),
        "used_by": list(mechanism.used_by),
        "equation": mechanism.equation,
        "capabilities": sorted(mechanism.capabilities),
        "options": options,
    }


def padding_statement(mechanism: Mechanism, config: MechanismConfig) -> str:
    """What padding does to the outputs of a layer."""
    if not mechanism.can(Capability.PADDING):
        return "not supported"
    if mechanism.depends_on_padding(config):
        return "depends on padding: in front of a sequence it changes outputs, at the end it does not"
    turned = mechanism.can(Capability.ROTARY) and not config.cross
    if turned and mechanism.depends_on_padding(dataclasses.replace(config, rotary=config.rotary or Rotary())):
        return "changes no output; with rotary positions it depends on padding in front of a sequence"
    return "changes no output, in front of a sequence or at its end"


def by_use(mechanisms: Iterable[Mechanism]) -> list[Mechanism]:
    """The mechanisms of the most well-known models first, those of none by name."""
    return sorted(mechanisms, key=lambda mechanism: (-len(mechanism.used_by), mechanism.name))


def price(mechanism: Mechanism, config: MechanismConfig, tokens: int, dtype: str) -> dict[str, Any]:
    """The states and the cost of one layer for one sequence of `tokens` tokens."""
    states = mechanism.state(config)
    cost = mechanism.cost(config, Shape(batch=1, query=tokens, key=tokens))
    grown = state_bytes(states, tokens=tokens, source=tokens, dtype=dtype)
    shorter = state_bytes(states, tokens=tokens - 1, source=tokens - 1, dtype=dtype)
    return {
        "states": [_described(name, spec, dtype) for name, spec in states.items()],
        "tokens": tokens,
        "dtype": dtype,
        "state_bytes": grown,
        "state_bytes_per_token": grown - shorter,
        "flops": cost.flops,
        "allowed_flops": cost.allowed_flops,
        "parameters": cost.parameters,
    }


def _described(name: str, spec: StateSpec, dtype: str) -> dict[str, Any]:
    """One state: its name, its kind, and the shape and element type of a row of each of its fields."""
    fields = {field: {"shape": list(row.shape), "dtype": row.dtype or dtype} for field, row in spec.fields.items()}
    return {"name": name, "kind": type(spec).__name__.lower(), "fields": fields}


def verdicts(mechanism: Mechanism, config: MechanismConfig, call: WholeCall) -> list[dict[str, Any]]:
    """One row per part of the layer and kernel, the chosen kernel first."""
    rows = []
    for computation in mechanism.computations(config, call.tokens):
        rows += (
            [own_module(computation)]
            if computation.asked is None
            else kernel_rows(computation, computation.problem(call))
        )
    return rows


def paged_verdicts(
    mechanism: Mechanism, config: MechanismConfig, *, dtype: str, device: str, rows: str
) -> list[dict[str, Any]]:
    """One row per kernel for a step that reads cached rows of this form in place; empty if the step gathers them.

    If all kernels refuse, rows are gathered, and `verdicts` shows which kernel computes.
    """
    if rows not in CACHE_FORMS:
        raise InvalidValue.of("--rows", rows, ", ".join(CACHE_FORMS))
    computation = mechanism.paged_computation(config)
    if computation is None or rows not in computation.rows or not isinstance(computation.asked, AttentionSpec):
        return []
    return kernel_rows(computation, paged_problem(computation.asked, dtype=dtype, device=device, rows=rows))


def step_verdicts(mechanism: Mechanism, config: MechanismConfig, call: WholeCall) -> list[dict[str, Any]]:
    """One row per kernel for a decode step that updates states of fixed size in their store; empty if the mechanism
    uses no kernel for it. If all kernels refuse, the mechanism's own module computes the step."""
    asked = mechanism.recurrent_step(config)
    if asked is None:
        return []
    computation = Computation(part=DECODE_STEP, asked=asked, below=PLAIN)
    found = kernel_rows(computation, computation.problem(call))
    return [row for row in found if row["verdict"] != "refuse"]  # kernels of other operations are listed above


def recorded_steps(mechanism: Mechanism, config: MechanismConfig, *, dtype: str, device: str) -> list[dict[str, Any]]:
    """The rows that show whether decode steps, and steps with prompts, can be recorded once and replayed as CUDA
    graphs."""
    reasons = {
        part: eager_reason(mechanism, config, length, dtype=dtype, device=device)
        for part, length in QUERY_LENGTHS.items()
    }
    verdicts = {part: "can be recorded" if reason is None else "runs eagerly" for part, reason in reasons.items()}
    return [
        row_of(Computation(part=part), "CUDA graph", verdicts[part], reasons=reason or "")
        for part, reason in reasons.items()
    ]


def eager_reason(
    mechanism: Mechanism, config: MechanismConfig, max_query_len: int, *, dtype: str, device: str
) -> str | None:
    """Why steps of up to `max_query_len` tokens of a request run eagerly, without a CUDA graph; None if they can be
    recorded."""
    if not mechanism.can(Capability.INCREMENTAL):
        return REPLAYED
    if mechanism.asks_the_host and max_query_len == 1:
        return ASKS_THE_HOST
    reason = state_reason(f"mechanism {mechanism.name!r}", mechanism.state(config), max_query_len)
    if reason is not None or (max_query_len == 1 and _always_as_many(mechanism, config)):
        return reason
    computation = mechanism.paged_computation(config)
    if computation is None or not isinstance(computation.asked, AttentionSpec):
        return gathers("cached rows")
    form = "plain" if "plain" in computation.rows else computation.rows[0]
    problem = paged_problem(computation.asked, dtype=dtype, device=device, rows=form)
    verdicts = explain([kernel for kernel in installed().kernels if isinstance(kernel, PagedAttendKernel)], problem)
    accepting = [verdict.kernel for verdict in verdicts if verdict.accepted]
    if not accepting:
        refused = "; ".join(f"{verdict.kernel.name}: {', '.join(verdict.reasons)}" for verdict in verdicts)
        return f"{gathers('cached rows')}: {refused or 'no installed kernel reads them in place'}"
    return None if accepting[0].records(max_query_len) else plans_on_the_host(accepting[0].name)


def _always_as_many(mechanism: Mechanism, config: MechanismConfig) -> bool:
    """Whether a step reads equally many elements for every request: states of fixed size, or rows of narrow windows."""
    states = mechanism.state(config).values()
    rows = [state for state in states if isinstance(state, Paged)]
    if any(not always_as_many(state.window) for state in rows):
        return False
    # A mechanism's own module with both kinds of state depends on the number of tokens of each request.
    return not rows or mechanism.spec(config) is not None or not any(isinstance(state, Slot) for state in states)


def own_module(computation: Computation) -> dict[str, Any]:
    """The row for a part that the mechanism's own module computes."""
    cost = None if computation.asked is None else computation.below
    reasons = "no kernel is used" if computation.asked is None else "no kernel is predicted to cost less"
    return row_of(computation, "its own module", "runs", cost=cost, reasons=reasons)


def kernel_rows(computation: Computation, problem: Problem) -> list[dict[str, Any]]:
    """One row per kernel with its verdict on one part of a layer; kernels of other operations share one row."""
    kernels = list(installed().kernels)
    verdicts = explain([kernel for kernel in kernels if kernel.operation == problem.operation], problem)
    cheap = [verdict for verdict in verdicts if verdict.cost is not None and verdict.cost < computation.below]
    rows = [] if cheap or math.isinf(computation.below) else [own_module(computation)]
    for verdict in verdicts:
        word = "refuses" if not verdict.accepted else "runs" if verdict in cheap[:1] else "would accept"
        details = [*verdict.reasons, *([verdict.remark] if verdict.remark and word == "runs" else [])]
        details += [f"measured on {verdict.measured_on}"] if verdict.measured_on else []
        rows.append(row_of(computation, verdict.kernel.name, word, cost=verdict.cost, reasons="; ".join(details)))
    others = [kernel for kernel in kernels if kernel.operation != problem.operation]
    if others:
        operations = ", ".join(sorted({kernel.operation for kernel in others}))
        names = ", ".join(sorted(kernel.name for kernel in others))
        reasons = f"compute {operations}, not {problem.operation}: {names}"
        rows.append(row_of(computation, f"{len(others)} others", "refuse", reasons=reasons))
    return rows


def row_of(
    computation: Computation, name: str, verdict: str, *, cost: float | None = None, reasons: str = ""
) -> dict[str, Any]:
    """One row of the table; the cost is a fraction of the plain computation's time, None if it is not known."""
    return {"part": computation.part, "name": name, "verdict": verdict, "cost": cost, "reasons": reasons}


def weights_statement(mechanism: Mechanism) -> str:
    """A sentence that states whether the mechanism can return attention weights."""
    if mechanism.can(Capability.WEIGHTS):
        return "on request, [batch, heads, query, key]"
    return "none: its output is not computed from one weight per query-key pair"


def rowwise_verdicts(operation: str, width: int, *, form: str | None, **known: Any) -> list[dict[str, Any]]:
    """One row per kernel of an operation on rows of `width` elements, and one for torch.

    `form` is by default the operation's first form. If all kernels refuse, or none is installed, torch computes.
    """
    problem = row_problem(operation, width, form=form or ROW_FORMS[operation][0], **known)
    part = Computation(part=operation)
    found = kernel_rows(part, problem)
    taken = any(row["verdict"] == "runs" for row in found)
    torch = row_of(part, "torch", "would accept" if taken else "runs", cost=1.0)
    return [found[0], torch, *found[1:]] if taken else [torch, *found]
