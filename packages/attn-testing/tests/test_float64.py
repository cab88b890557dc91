"""Within `in_float64`, code that insists on float32 computes in float64, and only there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attn_testing.float64 import in_float64, widened


def odds(shares):
    return shares[1] / shares[0]


INSISTENT = {
    "to": lambda rows: rows.to(torch.float32).exp(),
    "to, by name": lambda rows: rows.to(dtype=torch.float).exp(),
    "type": lambda rows: rows.type(torch.float32).exp(),
    "float": lambda rows: rows.float().exp(),
    "made": lambda rows: rows * torch.ones(1, dtype=torch.float32).exp() / torch.tensor(1.0).exp() * math.e,
    "softmax": lambda rows: odds(torch.stack([0 * rows, rows]).softmax(0, torch.float32)),
}


class Model(nn.Module):
    """A gain, and a table that is computed when the model is built."""

    def __init__(self, compute):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.compute, self.third = compute, torch.tensor(1, dtype=torch.int64).float() / 3

    def forward(self, rows):
        return self.compute(self.gain * rows) * self.third


@pytest.mark.parametrize("compute", INSISTENT.values(), ids=INSISTENT)
def test_a_model_that_converts_to_float32_is_exact(compute):
    narrow, one = Model(compute), torch.ones(1, dtype=torch.float64)
    assert abs(narrow(one.float()).item() - math.e / 3) > 1e-9
    with in_float64():
        assert widened(lambda: Model(compute), narrow)(one).item() == pytest.approx(math.e / 3, rel=1e-15)
    assert torch.get_default_dtype() == torch.float32
    assert one.float().dtype == torch.float32


def test_weights_are_those_that_were_given():
    narrow = Model(torch.exp)
    narrow.gain.data.fill_(2.5)
    with in_float64():
        found = widened(lambda: Model(torch.exp), narrow)
    assert (found.gain.item(), found.gain.dtype, found.training) == (2.5, torch.float64, False)
