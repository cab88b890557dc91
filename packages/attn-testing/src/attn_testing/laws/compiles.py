"""Compiling changes nothing but the speed."""

from __future__ import annotations

import torch

from attn_testing.case import Case
from attn_testing.expect import LawBroken, require_same
from attn_testing.law import MechanismLaw

BACKEND = "aot_eager"
"""Traces forward and backward as every backend does, and needs no C++ compiler."""


class Compiles(MechanismLaw):
    """`torch.compile(fullgraph=True)` captures the layer for any length at once, and it gives the same."""

    cases_at_most = 4

    def test_the_layer_compiles_without_a_graph_break_and_gives_the_same(self, case: Case) -> None:
        layer = case.build()
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=BACKEND)
        for batch, length in ((2, 6), (3, 9)):
            query, source = case.rows(batch, length), case.source(batch, length + 1)
            try:
                out = case.attend(query, source, None, compiled)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise LawBroken(f"[{batch}, {length}]: {str(error).strip()}") from error
            require_same(out, case.attend(query, source), f"compiled and not, [{batch}, {length}]", 1e-10)
