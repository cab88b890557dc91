"""A kernel that reads the cached rows of chosen blocks in place computes what the layer computes of whole texts."""

from __future__ import annotations

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.stores import StoreSize
from attn_kernels_cpu import library
from attn_kernels_cpu.compiling import why_not
from attn_sparse.indexed_blocks.selection import IndexedBlocksAttention
from attn_variants import layer
from attn_variants.layers import configured

LENGTHS, PROMPTS = (37, 5, 64), (17, 1, 50)


@pytest.mark.parametrize(("block", "top", "kv_heads"), [(4, 2, 2), (16, 3, 1), (4, 1, 4)])
def test_steps_of_one_token_equal_the_whole(
    block: int, top: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    library.loaded()
    by_kernel, taken = IndexedBlocksAttention._by_kernel, []

    def seen(self, *operands):
        taken.append(by_kernel(self, *operands))
        return taken[-1]

    monkeypatch.setattr(IndexedBlocksAttention, "_by_kernel", seen)
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": kv_heads, "index_size": 8, "block": block, "top": top}
    mechanism, module = installed().mechanisms.get("indexed_blocks"), layer("indexed_blocks", **sizes).eval()
    texts = [torch.randn(length, 64) for length in LENGTHS]
    size = StoreSize(tokens=256, requests=len(texts), dtype="float32", device="cpu")
    store = installed().caches.get("paged").create({"layer": mechanism.state(configured(mechanism, **sizes))}, size)
    for request, length in enumerate(LENGTHS):
        store.admit(request)
        store.reserve(request, length)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    contexts = [0] * len(texts)
    with torch.no_grad():
        while live := [request for request, length in enumerate(LENGTHS) if contexts[request] < length]:
            counts = [1 if contexts[request] else PROMPTS[request] for request in live]
            batch = RaggedBatch.of(counts, [contexts[request] for request in live], torch.tensor)
            places = [
                slice(contexts[request], contexts[request] + count) for request, count in zip(live, counts, strict=True)
            ]
            rows = torch.cat([texts[request][place] for request, place in zip(live, places, strict=True)])
            out = module.step(rows, batch, store.view(batch, live)["layer"])
            for request, part, place in zip(live, torch.split(out, counts), places, strict=True):
                found[request].append(part)
                contexts[request] = place.stop
        wanted = [module(text[None])[0] for text in texts]
    assert taken
    assert all(out is not None for out in taken)
    for parts, whole in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)
