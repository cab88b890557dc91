"""What is brought to a device once is kept for real tensors, never from a trace or a mode that has no numbers."""

from __future__ import annotations

import pytest
import torch
from attn_core import Rotary
from attn_core.modifiers import DependencyTree
from attn_variants.compute.dependency import depths_of
from attn_variants.compute.rotary import cos_sin_to, frequencies_on
from attn_variants.mechanisms.sinusoidal_layers import sinusoidal_at
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")
TREE = DependencyTree(heads=(1, 2, -1, 2, 3))
# Sizes that no other test asks for, so that nothing is kept when these begin.
TABLES = {
    "turns": lambda: cos_sin_to(Rotary(base=777.0), 6, 5, torch.ones(1)).cosines,
    "frequencies": lambda: frequencies_on(Rotary(base=778.0), 6, CPU),
    "sinusoids": lambda: sinusoidal_at(torch.arange(5), 22, torch.ones(1)),
    "depths": lambda: depths_of(TREE, CPU),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_made_of_fake_tensors_is_not_kept_for_real_ones(table: str) -> None:
    with FakeTensorMode():
        assert isinstance(TABLES[table](), FakeTensor)
    real = TABLES[table]()
    assert type(real) is torch.Tensor
    assert real.isfinite().all()
