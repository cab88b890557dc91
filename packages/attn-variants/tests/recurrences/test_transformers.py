"""Layers with the weights of the package `transformers` compute what its layers do.

All weights of theirs are drawn anew: fresh norms and biases are neutral, so that a layer without them would agree.
"""

import importlib

import pytest
import torch
from attn_core import configure, installed

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, SIZE = 16, 2, 4
KDA = {
    "kimi_linear": ("KimiLinearDeltaAttention", "KimiLinearConfig", {}, {}),
    "bailing_hybrid": (
        "BailingHybridDeltaAttention",
        "BailingHybridConfig",
        {"kda_lower_bound": -5.0},
        {"rank": 0, "lower_bound": -5.0},
    ),
    "glm5_next": (
        "Glm5NextTextLinearAttention",
        "Glm5NextTextConfig",
        {"linear_lower_bound": -3.0},
        {"lower_bound": -3.0},
    ),
}
"""By module of theirs: their layer, its config and what differs there, and our options."""


def drawn(layer):
    """Their layer with all weights drawn anew."""
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.3)
    return layer


def built(name, **options):
    mechanism = installed().mechanisms.get(name)
    return mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, head_dim=SIZE))


def load(pairs):
    with torch.no_grad():
        for mine, other in pairs:
            mine.copy_(other)


def gate_pairs(ours, theirs, names):
    """The weights of a gate of ours, of one linear layer or two, and those of theirs with one of these names."""
    own = list(ours) if isinstance(ours, torch.nn.Sequential) else [ours]
    found = [getattr(theirs, name) for name in names if hasattr(theirs, name)]
    return [(mine.weight, other.weight) for mine, other in zip(own, found, strict=True)]


@pytest.mark.parametrize("family", KDA)
def test_kimi_delta_attention_is_that_of_its_families(agrees, monkeypatch, family):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        # Their own functions: fla's, which take over where it is installed, want a GPU.
        monkeypatch.setattr(module, name, getattr(getattr(module, name), "__wrapped__", getattr(module, name)))
    layer, config, differing, options = KDA[family]
    settings = getattr(importlib.import_module(f"transformers.models.{family}"), config)(
        hidden_size=WIDTH,
        linear_num_heads=HEADS,
        linear_head_dim=SIZE,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-3,
        **differing,
    )
    theirs = drawn(getattr(module, layer)(settings, 0))
    gate = theirs.forget_gate
    ours = built("kda", chunk=8, norm_eps=1e-3, **options)
    load(
        [
            (ours.query.weight, theirs.q_proj.weight),
            (ours.key.weight, theirs.k_proj.weight),
            (ours.value.weight, theirs.v_proj.weight),
            (ours.convolution.weight, theirs.conv1d.weight[:, 0]),
            *gate_pairs(ours.fade, gate, ("f_a_proj", "f_b_proj", "f_proj")),
            (ours.rate, gate.A_log.flatten()),
            (ours.step_bias, gate.dt_bias.view(HEADS, SIZE)),
            (ours.strength.weight, theirs.b_proj.weight),
            *gate_pairs(ours.gate, theirs, ("g_a_proj", "g_b_proj", "g_proj")),
            (ours.norm, theirs.o_norm.weight),
            (ours.output.weight, theirs.o_proj.weight),
        ]
    )
    oracle = agrees("kda", package=f"transformers {layer}")
    oracle.functions(ours, theirs, torch.randn(2, 37, WIDTH), tolerance=1e-4)  # theirs is float32 inside


@pytest.mark.parametrize("place", [0, 2, 3])
def test_lightning_attention_is_that_of_every_layer_of_minimax(agrees, place):
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = transformers.MiniMaxConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        head_dim=SIZE,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 4,
        block_size=8,
    )
    theirs = drawn(MiniMaxLightningAttention(config, place))
    ours = built("lightning", chunk=16, slope_factor=1 - place / (4 - 1 + 1e-5) + 1e-5)
    query, key, value = theirs.qkv_proj.weight.unflatten(0, (HEADS, 3, SIZE)).unbind(1)
    load(
        [
            (ours.query.weight, query.flatten(0, 1)),
            (ours.key.weight, key.flatten(0, 1)),
            (ours.value.weight, value.flatten(0, 1)),
            (ours.gate.weight, theirs.output_gate.weight),
            (ours.norm, theirs.norm.weight),
            (ours.output.weight, theirs.out_proj.weight),
        ]
    )
    agrees("lightning", package="transformers MiniMaxLightningAttention").functions(
        ours, lambda rows: theirs(rows, None, None)[0], torch.randn(2, 37, WIDTH), tolerance=1e-4
    )
