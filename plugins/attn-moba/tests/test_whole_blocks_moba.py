"""Whole sequences are read by torch's fused function, a block with all who chose it."""

import pytest
import torch
from attn_core import configure
from attn_moba import Moba, reading
from torch.nn.attention import SDPBackend, sdpa_kernel


def build(options, **shared):
    torch.manual_seed(0)
    return Moba().build(configure(Moba(), options, width=32, **shared)).double()


OPTIONS = [{"block": 8, "top": 3}, {"block": 5, "top": 1}, {"block": 4, "top": 9}]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("tokens", [1, 7, 8, 33, 100])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fused_reading_gives_what_reading_in_tiles_gives(options, tokens, groups):
    layer, rows = build(options, heads=4, key_value_heads=groups), torch.randn(2, tokens, 32, dtype=torch.float64)
    with torch.no_grad():
        found = layer(rows)
        # Without flash attention there is no fused function, and blocks are read in tiles.
        with sdpa_kernel(SDPBackend.MATH):
            expected = layer(rows)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_fused_reading_is_for_whole_sequences_without_gradients_or_padding(monkeypatch):
    read, layer = [], build(OPTIONS[0], heads=4)
    monkeypatch.setattr(reading, "fused", lambda *given, causal: read.append(causal) or fused(*given, causal=causal))
    rows, keep = torch.randn(1, 20, 32, dtype=torch.float64), torch.ones(1, 20, dtype=torch.bool)
    layer(rows)
    with torch.no_grad():
        layer(rows, keep=keep)
        assert not read
        layer(rows)
    assert set(read) == {True, False}


fused = reading.fused
