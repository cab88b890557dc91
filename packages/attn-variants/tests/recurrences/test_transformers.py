"""Layers with the weights of the package `transformers` compute what its layers do."""

import pytest
import torch
from attn_core import configure, installed

transformers = pytest.importorskip("transformers")
modeling_kimi_linear = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
modeling_minimax = pytest.importorskip("transformers.models.minimax.modeling_minimax")

WIDTH, HEADS, SIZE = 16, 2, 4


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    """Their own functions: fla's, which take over where it is installed, want a GPU."""
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        function = getattr(modeling_kimi_linear, name)
        monkeypatch.setattr(modeling_kimi_linear, name, getattr(function, "__wrapped__", function))


def built(name, **options):
    mechanism = installed().mechanisms.get(name)
    return mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, head_dim=SIZE))


def load(pairs):
    with torch.no_grad():
        for mine, other in pairs:
            mine.copy_(other)


def test_kimi_delta_attention_is_that_of_kimi_linear(agrees):
    torch.manual_seed(0)
    theirs = modeling_kimi_linear.KimiLinearDeltaAttention(
        transformers.KimiLinearConfig(
            hidden_size=WIDTH,
            linear_num_heads=HEADS,
            linear_head_dim=SIZE,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    )
    gate = theirs.forget_gate
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(std=0.3)
    ours = built("kda", chunk=8)
    load(
        [
            (ours.query.weight, theirs.q_proj.weight),
            (ours.key.weight, theirs.k_proj.weight),
            (ours.value.weight, theirs.v_proj.weight),
            (ours.convolution.weight, theirs.conv1d.weight[:, 0]),
            (ours.fade[0].weight, gate.f_a_proj.weight),
            (ours.fade[1].weight, gate.f_b_proj.weight),
            (ours.rate, gate.A_log.flatten()),
            (ours.step_bias, gate.dt_bias.view(HEADS, SIZE)),
            (ours.strength.weight, theirs.b_proj.weight),
            (ours.gate[0].weight, theirs.g_a_proj.weight),
            (ours.gate[1].weight, theirs.g_b_proj.weight),
            (ours.norm, theirs.o_norm.weight),
            (ours.output.weight, theirs.o_proj.weight),
        ]
    )
    oracle = agrees("kda", package="transformers KimiLinearDeltaAttention")
    oracle.functions(ours, theirs, torch.randn(2, 37, WIDTH), tolerance=1e-4)  # theirs is float32 inside


def test_lightning_attention_is_that_of_minimax_with_its_gate_half_open(agrees):
    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        head_dim=SIZE,
        num_hidden_layers=2,
        layer_types=["linear_attention"] * 2,
        block_size=8,
    )
    theirs = modeling_minimax.MiniMaxLightningAttention(config, 0)
    ours = built("lightning", chunk=16)
    query, key, value = theirs.qkv_proj.weight.unflatten(0, (HEADS, 3, SIZE)).unbind(1)
    load(
        [
            (theirs.output_gate.weight, torch.zeros_like(theirs.output_gate.weight)),
            (ours.query.weight, query.flatten(0, 1)),
            (ours.key.weight, key.flatten(0, 1)),
            (ours.value.weight, value.flatten(0, 1)),
            (ours.norm, theirs.norm.weight),
            (ours.output.weight, theirs.out_proj.weight),
        ]
    )
    agrees("lightning", package="transformers MiniMaxLightningAttention").functions(
        ours, lambda rows: 2 * theirs(rows, None, None)[0], torch.randn(2, 37, WIDTH), tolerance=1e-4
    )
