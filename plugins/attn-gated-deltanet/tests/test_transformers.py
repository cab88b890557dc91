import torch
from attn_core import configure
from attn_gated_deltanet import GatedDeltaNet
from attn_testing import Agreement
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

WIDTH, HEADS, KEY, VALUE = 16, 2, 4, 6


def pair():
    """Qwen3-Next's layer and ours, with the same weights."""
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=WIDTH,
            linear_num_key_heads=HEADS,
            linear_num_value_heads=HEADS,
            linear_key_head_dim=KEY,
            linear_value_head_dim=VALUE,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    )
    mechanism = GatedDeltaNet()
    config = configure(mechanism, {"value_size": VALUE, "chunk": 8}, width=WIDTH, heads=HEADS, head_size=KEY)
    ours = mechanism.build(config)
    mixed = theirs.in_proj_qkvz.weight.unflatten(0, (HEADS, -1)).split([KEY, KEY, VALUE, VALUE], dim=1)
    strength, fade = theirs.in_proj_ba.weight.unflatten(0, (HEADS, 2)).unbind(1)
    with torch.no_grad():
        for name, weight in zip(("query", "key", "value", "gate"), mixed, strict=True):
            getattr(ours, name).weight.copy_(weight.flatten(0, 1))
        for mine, other in (
            (ours.strength.weight, strength),
            (ours.fade.weight, fade),
            (ours.filters, theirs.conv1d.weight[:, 0]),
            (ours.rate, theirs.A_log),
            (ours.fade_bias, theirs.dt_bias),
            (ours.norm, theirs.norm.weight),
            (ours.output.weight, theirs.out_proj.weight),
        ):
            mine.copy_(other)
    return ours, theirs


def test_the_layer_and_its_gradient_are_those_of_qwen3_next(record_property):
    torch.manual_seed(0)
    ours, theirs = pair()
    oracle = Agreement(record_property, "gated_deltanet", package="transformers Qwen3NextGatedDeltaNet")
    oracle.functions(ours, theirs, torch.randn(2, 70, WIDTH), tolerance=1e-4)  # theirs is float32 inside
