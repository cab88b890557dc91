"""Compiled layers choose the kernel that skips what nobody sees, as others do."""

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Heads, Window, installed
from attn_core.masks import BigBird, Neighbourhood
from attn_variants.attention.kernels import COMPILED, AttentionKernels
from attn_variants.compute.block_sparse import compiled
from attn_variants.compute.block_sparse.compiled import named, tiles, tiles_backward
from attn_variants.compute.block_sparse.layout import parts
from attn_variants.compute.block_sparse.tiles import Layout, gradients, outputs

NAMES = {
    "sliding_window": {"window": 40},
    "bigbird": {"block": 8, "random": 1},
}


@pytest.mark.parametrize(("name", "padded"), [("sliding_window", False), ("bigbird", True)])
def test_a_compiled_layer_computes_by_tiles_what_the_layer_does_forward_and_backward(build, monkeypatch, name, padded):
    layer = build(name, NAMES[name], hidden_size=16, num_heads=4)
    torch.compiler.reset()
    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    ran, whole = [], compiled.outputs
    monkeypatch.setattr(compiled, "outputs", lambda *given: ran.append(1) or whole(*given))
    for length in (130, 90):
        rows = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
        key_padding_mask = torch.arange(length) < torch.tensor([[length], [length - 77]]) if padded else None
        found = []
        for call in (layer, fast):
            out = call(rows, key_padding_mask=key_padding_mask)
            weights = [rows, *layer.parameters()]
            found.append([out, *torch.autograd.grad(out.square().sum(), weights, allow_unused=True)])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=0, atol=1e-11)
    assert ran


def test_operators_say_beforehand_what_they_give():
    mask = Window(left=9)
    rows = torch.randn(1, 2, 1, 90, 8, dtype=torch.float64, requires_grad=True)
    memory = [torch.randn(1, 2, 90, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(tiles, (rows, *memory, None, named(mask), 0.3))
    out, sums = outputs(rows, *memory, Layout(parts(mask, 90, 90), 0.3, None))
    saved = [part.detach() for part in (rows, *memory, out, sums)]
    found = tiles_backward(torch.ones_like(saved[0]), saved, None, named(mask), 0.3)
    expected = gradients(torch.ones_like(saved[0]), saved, Layout(parts(mask, 90, 90), 0.3, None))
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def test_a_mask_is_named_by_what_it_says():
    assert named(Window(left=9)) == named(Window(left=9)) != named(Window(left=8))
    assert len(set(named(BigBird(block=8, random=2, number_of_heads=4)).split())) == 4
    assert len(named(Neighbourhood(size=5)).split()) == 1


def test_graphs_are_priced_for_long_sequences(monkeypatch):
    rows = torch.randn(1, 5, 1, 8)
    heads = Heads(query=1, key_value=1, key_size=8, value_size=8)
    plan, asked = AttentionKernels(AttentionSpec(heads=heads, mask=Window(left=2))), []

    def require(queries, keys, **_others):
        asked.append((queries, keys))
        return installed().kernels.get("plain")

    monkeypatch.setattr(plan._operation, "require", require)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plan.run(AttentionInputs(query=rows, key=rows, value=rows))
    assert asked == [(COMPILED, COMPILED)]
