"""The price on the label is the price paid."""

from __future__ import annotations

import torch
from attn_core import Shape
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attn_testing.case import Case
from attn_testing.expect import require
from attn_testing.law import MechanismLaw

SIZES = ((1, 4, 4), (2, 9, 9))
SOURCE_SIZES = ((1, 4, 7), (2, 9, 3))


class DeclaredCost(MechanismLaw):
    """Declared FLOPs equal those torch counts, declared parameters those the layer has."""

    def test_declared_flops_equal_counted_flops(self, case: Case) -> None:
        for batch, queries, keys in SOURCE_SIZES if case.cross else SIZES:
            said = case.mechanism.cost(case.config, Shape(batch=batch, query=queries, key=keys))
            counted = flops(case, batch, queries, keys)
            what = f"batch {batch}, {queries} queries, {keys} keys"
            require(said.flops == counted, f"{what}: {said.flops} FLOPs are declared, {counted} were counted")
            require(
                0 <= said.allowed_flops <= said.flops, f"{what}: {said.allowed_flops} allowed of {said.flops} FLOPs"
            )

    def test_declared_parameters_equal_those_of_the_layer(self, case: Case) -> None:
        said = case.mechanism.cost(case.config, Shape()).parameters
        has = sum(weight.numel() for weight in case.layer.parameters())
        require(said == has, f"{said} parameters are declared, the layer has {has}")


def flops(case: Case, batch: int, queries: int, keys: int) -> int:
    """FLOPs of the matrix products of one forward of the plain computation.

    A layer that chooses among kernels is told to use the plain one; torch's fused attention is taken apart, so that
    its products are counted.
    """
    layer = case.build()
    if hasattr(layer, "use_kernel"):
        layer.use_kernel("plain")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        case.attend(case.rows(batch, queries), case.source(batch, keys), None, layer)
    return int(counter.get_total_flops())
