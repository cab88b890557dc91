"""The types in which kernels of recurrences are handed their steps."""

import pytest
import torch
from attn_core import configure, installed
from attn_variants.kernels.recurrence import PlainChunked


@pytest.mark.parametrize("name", ["retnet", "gla", "deltanet"])
@pytest.mark.parametrize("automatic", [False, True])
def test_on_a_cpu_kernels_are_handed_float32_in_a_model_of_bfloat16(monkeypatch, name, automatic):
    mechanism, seen, compute = installed().mechanisms.get(name), set(), PlainChunked.run

    def run(self, steps, before, chunk):
        seen.update(part.dtype for part in steps if part is not None)
        return compute(self, steps, before, chunk)

    monkeypatch.setattr(PlainChunked, "run", run)
    layer, rows = mechanism.build(configure(mechanism, hidden_size=16, num_heads=2)), torch.randn(1, 9, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=automatic):
        out = layer(rows) if automatic else layer.bfloat16()(rows.bfloat16())
    assert out.dtype == torch.bfloat16
    assert seen == {torch.float32}
