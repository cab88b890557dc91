"""Laws of kernels, one per file."""

from __future__ import annotations

from attn_testing.law import Law
from attn_testing.laws.kernel.agrees_with_oracle import AgreesWithOracle
from attn_testing.laws.kernel.refuses_the_rest import RefusesTheRest

KERNEL_LAWS: tuple[type[Law], ...] = (AgreesWithOracle, RefusesTheRest)

__all__ = ["KERNEL_LAWS", "AgreesWithOracle", "RefusesTheRest"]
