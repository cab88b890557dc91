"""Company changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_testing.case import Case
from attn_testing.expect import require_same
from attn_testing.law import MechanismLaw
from attn_testing.laws.decode_equals_forward import silent_where_nothing_decodes
from attn_testing.serving import Serving

PLAN: tuple[Mapping[int, int], ...] = (
    {0: 3},
    {0: 1, 1: 6},
    {2: 2, 1: 1, 0: 1},
    {0: 1, 2: 4, 3: 1, 1: 1},
    {3: 5, 0: 1},
    {1: 1, 3: 1, 2: 1, 0: 1},
)
"""Steps of request -> new tokens: some prefill, in chunks, while others decode, and the order changes."""


class BatchInvariance(MechanismLaw):
    """A sequence alone gives what it gives in a batch, and a request alone what it gives in a crowd."""

    def test_a_sequence_alone_equals_itself_in_a_batch(self, case: Case) -> None:
        query, source = case.rows(3, 7), case.source(3, 5)
        with torch.no_grad():
            together = case.attend(query, source)
            for row in range(3):
                alone = case.attend(query[row : row + 1], None if source is None else source[row : row + 1])
                require_same(together[row], alone[0], f"sequence {row} of a batch of 3 and alone", 1e-10)

    def test_a_request_alone_equals_itself_in_a_crowd(self, case: Case) -> None:
        if silent_where_nothing_decodes(case):
            return
        names = sorted({name for step in PLAN for name in step})
        rows = {name: case.rows(20, seed=10 + name) for name in names}
        sources = {name: case.source(3 + name, seed=30 + name) for name in names}
        crowd = follow(case, PLAN, rows, sources)
        for name in names:
            own = tuple({name: step[name]} for step in PLAN if name in step)
            alone = follow(case, own, rows, sources)[name]
            require_same(crowd[name], alone, f"request {name} in a crowd of {len(names)} and alone", case.tolerance)


def follow(
    case: Case, plan: tuple[Mapping[int, int], ...], rows: Mapping[int, Tensor], sources: Mapping[int, Tensor | None]
) -> dict[int, Tensor]:
    """The outputs [tokens, width] of every request of a plan; a request is opened when it first comes."""
    serving = Serving(case)
    out: dict[int, list[Tensor]] = {}
    for step in plan:
        for name in step:
            if name not in serving.done:
                serving.open(name, sources[name])
        new = {name: rows[name][serving.done[name] : serving.done[name] + length] for name, length in step.items()}
        for name, got in serving.step(new).items():
            out.setdefault(name, []).append(got)
    return {name: torch.cat(got) for name, got in out.items()}
