"""Every instruction set gives the bits of every other, except products in the tile registers of AMX."""

from __future__ import annotations

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.stores import StoreSize
from attn_kernels_cpu.forms import FORMS
from attn_kernels_cpu.packed import PackedLinear
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import quantize_model
from attn_schema.decoder import DecoderConfig

MODEL = {
    "vocab_size": 61,
    "max_seq_len": 128,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "mechanism": "gqa",
    "num_kv_heads": 2,
    "norm": "rms",
    "feed_forward": "swiglu",
    "positions": "rotary",
}
HEADS = {
    "plain": {},
    "wide": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 48},
    "interleaved": {"rope_interleave": True},
    "window": {"mechanism": "sliding_window", "options": {"window": 9}},
}


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.parts and not form.block])
def test_products_have_the_same_bits(with_both, form):
    def compute():
        torch.manual_seed(5)
        layer = PackedLinear(form, torch.randn(131, 96), torch.randn(131))
        x = torch.randn(31, 96) * torch.logspace(-30, 30, 31)[:, None]
        x[7, 3], x[9, 40] = torch.nan, -torch.inf
        rows = [x, x[:1], x[7:10], x[:5]]
        return [layer(part) for part in rows] + [layer.largest(part) for part in rows]

    for one, other in with_both(compute):
        assert torch.equal(one.nan_to_num(1.0), other.nan_to_num(1.0))


def hidden_rows(fields, weights, dtype, cache):
    """Of a prompt in two chunks and of single tokens beside another's prompt."""
    torch.manual_seed(11)
    model = Decoder(DecoderConfig.from_plain(MODEL | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    quantize_model(model, weights)
    assert model.stack is not None
    size = StoreSize(tokens=256, requests=2, dtype=dtype)
    store = installed().caches.get(cache).create(model.state_specs(), size)
    found, done = [], [0, 0]
    for request in range(2):
        store.admit(request)
    for lengths in ([17, 0], [30, 5], [1, 40], [1, 1]):
        rows = [r for r in range(2) if lengths[r]]
        for r in rows:
            assert store.reserve(r, done[r] + lengths[r])
        rows = store.order(rows)
        batch = RaggedBatch.of([lengths[r] for r in rows], [done[r] for r in rows], torch.tensor)
        with torch.no_grad():
            found.append(model.step(torch.randint(61, (sum(lengths),)), batch, store.view(batch, rows)))
        done = [before + length for before, length in zip(done, lengths, strict=True)]
    return found


@pytest.mark.parametrize(
    ("weights", "dtype", "cache"),
    [
        *[("int8", "float32", "paged"), ("int4", "bfloat16", "paged")],
        *[("float32", "bfloat16", "paged"), ("float32", "float32", "int8"), ("float32", "float32", "float16")],
    ],
)
@pytest.mark.parametrize("name", HEADS)
def test_blocks_have_the_same_bits(with_both, name, weights, dtype, cache):
    for one, other in with_both(lambda: hidden_rows(HEADS[name], weights, dtype, cache)):
        assert torch.equal(one, other)
