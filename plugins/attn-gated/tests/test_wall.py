"""Wall attention beside the plain torch function of fla-core, and what only it guarantees."""

import importlib.metadata
import importlib.util
import sys
import types

import pytest
import torch
from attn_core import configure, installed
from attn_gated.wall import TILE, Wall
from attn_testing import Agreement, MechanismLaws

WALL = Wall()
SHARED = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}


class TestWall(MechanismLaws):
    mechanism = "wall"


class TestWallWithScalarGates(MechanismLaws):
    mechanism = "wall"
    options = {"scalar_gate": True, "gate_init_bias": 0.0}


def built(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = WALL.build(configure(WALL, {"gate_init_bias": 0.5} | options, **SHARED)).to(dtype)
    torch.nn.init.normal_(layer.inner.gate.weight, std=0.4)
    return layer


@pytest.mark.oracle
@pytest.mark.parametrize("scalar", [False, True])
def test_it_is_that_of_fla(record_property, monkeypatch, scalar):
    # The package itself needs triton; the file takes two small helpers from it.
    helpers = {
        "constant": types.SimpleNamespace(RCP_LN2=1.4426950216),
        "cumsum": types.SimpleNamespace(chunk_global_cumsum=lambda s, cu_seqlens, scale: s.cumsum(1) * scale),
    }
    for name in ("fla", "fla.ops", "fla.ops.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, module in helpers.items():
        monkeypatch.setitem(sys.modules, f"fla.ops.utils.{name}", module)
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/wall_attn/naive.py")
    found = importlib.util.spec_from_file_location("fla_naive_wall", path)
    peer = importlib.util.module_from_spec(found)
    found.loader.exec_module(peer)
    layer = built(torch.float32, scalar_gate=scalar)

    def theirs(rows):
        query, key, value = (part(rows).unflatten(-1, (-1, 8)) for part in (layer.query, layer.key, layer.value))
        gates = layer.inner.remember(rows, None)
        out = peer.naive_wall_attn(query, key, value, gates["gate"], scale=8**-0.5, g_scalar=gates.get("scalar"))
        return layer.output(out.flatten(-2))

    same = Agreement(record_property, "wall", package="fla-core naive_wall_attn")
    learned = [(weight, weight) for weight in layer.parameters()]
    same.functions(layer, theirs, torch.randn(2, 20, 32), tolerance=1e-4, weights=learned)


def test_open_gates_are_softmax_attention(record_property):
    layer, gqa = built(), installed().mechanisms.get("gqa")
    plain = gqa.build(configure(gqa, {}, **SHARED)).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.nn.init.zeros_(layer.inner.gate.weight)
    torch.nn.init.constant_(layer.inner.gate.bias, 50.0)
    rows = torch.randn(2, 20, 32, dtype=torch.float64)
    same = Agreement(record_property, "wall", identity="with open gates gqa")
    same.functions(layer, plain, rows, tolerance=1e-12)


def test_scalar_gates_alone_are_forgetting(record_property):
    layer, forgetting = built(scalar_gate=True), installed().mechanisms.get("forgetting")
    plain = forgetting.build(configure(forgetting, {}, **SHARED)).double()
    gates = layer.inner.gate
    with torch.no_grad():
        both = [part.unflatten(0, (4, 9)).split([8, 1], 1) for part in (gates.weight, gates.bias)]
        channels, scalars = zip(*both, strict=True)
        channels[0].zero_()
        channels[1].fill_(50.0)
        attention = {name: weight for name, weight in layer.state_dict().items() if not name.startswith("inner")}
        plain.load_state_dict(attention, strict=False)
        plain.inner.gate.weight.copy_(scalars[0][:, 0])
        plain.inner.gate.bias.copy_(scalars[1][:, 0])
    rows = torch.randn(2, 20, 32, dtype=torch.float64)
    same = Agreement(record_property, "wall", identity="with scalar gates alone forgetting")
    same.outputs(layer(rows), plain(rows), 1e-12)


def test_tiles_of_queries_are_the_pairs_and_fast_gates_are_finite():
    layer = built(scalar_gate=True)
    torch.nn.init.normal_(layer.inner.gate.weight, std=30.0)
    rows = torch.randn(2, 2 * TILE + 7, 32, dtype=torch.float64, requires_grad=True)
    real = torch.ones(2, rows.shape[1], dtype=torch.bool)
    real[0, -9:] = False
    out = layer(rows, key_padding_mask=real)
    weights = layer.weights(rows, key_padding_mask=real)
    value = layer.value(rows).unflatten(-1, (2, 8)).repeat_interleave(2, 2).transpose(1, 2)
    expected = layer.output((weights @ value).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out[real], expected[real])
    found, given = (
        torch.autograd.grad(one[real].square().sum(), rows, retain_graph=True)[0] for one in (out, expected)
    )
    assert found.isfinite().all()
    torch.testing.assert_close(found, given)
