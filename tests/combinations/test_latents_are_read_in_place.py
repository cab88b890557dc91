"""Decoding steps that read cached latents where they lie, in C++, equal whole sequences, computed by PyTorch."""

import pytest
import torch
from attn_core import RaggedBatch, configure, installed
from attn_core.stores import StoreSize
from attn_kernels_cpu.compiling import why_not
from attn_kernels_cpu.library import library
from attn_kernels_cpu.paged import attend

SIZES = {"latent": 32, "query_latent": 24, "rotary_size": 16}
INDEX = {"index_heads": 16, "index_size": 16, "top": 24}
POOLED = {"rotary_size": 0, "pool": 4}


@pytest.mark.parametrize(
    ("name", "options"),
    [("mla", SIZES), ("sparse_mla", SIZES | INDEX), ("sparse_mla", SIZES | INDEX | POOLED)],
    ids=["mla", "sparse_mla", "pools"],
)
def test_steps_over_latents_in_place_equal_whole_sequences(monkeypatch, name, options):
    if reason := why_not():
        pytest.skip(reason)
    library()
    calls = []
    monkeypatch.setattr("attn_kernels_cpu.paged.attend", lambda *given: calls.append(given) or attend(*given))
    torch.manual_seed(0)
    mechanism, lengths, prompts = installed().mechanisms.get(name), (70, 45), (61, 36)
    config = configure(mechanism, options, hidden_size=64, num_heads=6, head_dim=16)
    layer = mechanism.build(config).eval()
    rows = [torch.randn(length, 64) for length in lengths]
    store = (
        installed().caches.get("paged").create({"layer": mechanism.state(config)}, StoreSize(tokens=200, requests=2))
    )
    with torch.inference_mode():
        for request, (given, prompt) in enumerate(zip(rows, prompts, strict=True)):
            store.admit(request)
            store.reserve(request, len(given))
            batch = RaggedBatch.of([prompt], [0], torch.tensor)
            layer.step(given[:prompt], batch, store.view(batch, [request])["layer"])
        calls.clear()
        for step in range(9):
            places = [prompt + step for prompt in prompts]
            batch = RaggedBatch.of([1, 1], places, torch.tensor)
            new = torch.stack([given[at] for given, at in zip(rows, places, strict=True)])
            found = layer.step(new, batch, store.view(batch, [0, 1])["layer"])
            for out, given, at in zip(found, rows, places, strict=True):
                torch.testing.assert_close(out, layer(given[None, : at + 1])[0, -1], rtol=0, atol=2e-6)
    assert len(calls) == (9 if name == "mla" else 18)
