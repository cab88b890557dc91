"""Who computes an operation on rows, such as a norm."""

from __future__ import annotations

from typing import Any

from attn_core.computation import Computation
from attn_core.kernels.rowwise import ROW_FORMS, row_problem

from attn_cli.facts import row_of, said


def rowwise_verdicts(operation: str, width: int, *, form: str | None, **known: Any) -> list[dict[str, Any]]:
    """A row per kernel for rows of so many elements, in the first form if none is given, and one for torch.

    Where all kernels refuse, or are not here, torch computes.
    """
    problem = row_problem(operation, width, form=form or ROW_FORMS[operation][0], **known)
    part = Computation(part=operation)
    found = said(part, problem)
    taken = any(row["verdict"] == "runs" for row in found)
    torch = row_of(part, "torch", "would accept" if taken else "runs", cost="1")
    return [found[0], torch, *found[1:]] if taken else [torch, *found]
