"""Kernels are handed operands of the sizes that the spec they compute says: programs are made for those sizes."""

from __future__ import annotations

import pytest
import torch
from attn_core import Capability, Rotary, configure, installed
from attn_variants.attention.kernels import AttentionKernels

NAMES = sorted(mechanism.name for mechanism in installed().mechanisms if mechanism.can(Capability.CAUSAL))


@pytest.fixture
def calls(monkeypatch):
    """Sizes of spec and operands of each call of a kernel."""
    seen = []
    run = AttentionKernels.run

    def recorded(self, operands, spec=None):
        heads = (spec or self.spec).heads
        seen.append(
            (
                (heads.query, heads.key_value, heads.key_size, heads.value_size),
                (operands.query.shape[2], operands.key.shape[2], operands.query.shape[3], operands.value.shape[3]),
            )
        )
        return run(self, operands, spec)

    monkeypatch.setattr(AttentionKernels, "run", recorded)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_the_spec_of_a_kernel_says_the_sizes_of_its_operands(name, calls):
    mechanism = installed().mechanisms.get(name)
    rotary = {"rotary": Rotary()} if mechanism.can(Capability.ROTARY) else {}
    layer = mechanism.build(configure(mechanism, hidden_size=32, num_heads=4, **rotary))
    with torch.no_grad():
        layer(torch.randn(1, 12, 32))
    assert all(said == given for said, given in calls), calls
