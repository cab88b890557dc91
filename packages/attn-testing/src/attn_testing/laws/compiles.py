"""Compiling changes nothing but the speed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import ClassVar

import torch
from torch._dynamo.exc import TorchDynamoException

from attn_testing.case import Case
from attn_testing.expect import LawBroken, require_same
from attn_testing.law import MechanismLaw

SIZES = ((7, 17, 19), (11, 23, 29))
"""Batches, lengths and lengths of sources; the second must run what was captured at the first.

A size that is also the width, or another's, would be captured as one with it, so these are primes that are neither.
"""

SHORT = ((2, 3, 5), (3, 5, 7))
"""As `SIZES`, for loops over the tokens."""


class Compiles(MechanismLaw):
    """`torch.compile(fullgraph=True)` captures the layer once for all lengths, and it gives the same.

    A loop over the tokens is captured once for every length. Short batches show it as well, and sooner.
    `backend` is torch.compile's. "eager" captures the graph as every backend does, and needs no C++ compiler.
    """

    cases_at_most = 2
    backend: ClassVar[str] = "eager"

    def test_the_layer_compiles_without_a_graph_break_and_gives_the_same(self, case: Case) -> None:
        layer = case.build()
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=self.backend)
        loops = case.mechanism.sequential
        for time, (batch, length, keys) in enumerate(SHORT if loops else SIZES):
            query, source = case.rows(batch, length), case.source(batch, keys)
            try:
                once = time > 0 and not loops
                with torch.compiler.set_stance("fail_on_recompile") if once else nullcontext():
                    out = case.attend(query, source, None, compiled)
            except (TorchDynamoException, RuntimeError) as error:
                raise LawBroken(f"batch {batch}, length {length}: {str(error).strip()}") from error
            require_same(out, case.attend(query, source), f"compiled and not, batch {batch}, length {length}", 1e-10)
