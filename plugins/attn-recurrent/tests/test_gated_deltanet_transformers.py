import pytest
import torch
from attn_core import configure
from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_testing import Agreement
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

WIDTH, HEADS, KEY, VALUE = 16, 6, 4, 6


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    """Their own functions: fla's, which take over where it is installed, want a GPU."""
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        function = getattr(modeling_qwen3_next, name)
        monkeypatch.setattr(modeling_qwen3_next, name, getattr(function, "__wrapped__", function))


def pair(key_heads, eps):
    """Qwen3-Next's layer and ours, with the same weights."""
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=WIDTH,
            linear_num_key_heads=key_heads,
            linear_num_value_heads=HEADS,
            linear_key_head_dim=KEY,
            linear_value_head_dim=VALUE,
            num_hidden_layers=1,
            rms_norm_eps=eps,
            layer_types=["linear_attention"],
        ),
        0,
    )
    for weight in theirs.parameters():
        # Fresh norms and biases are neutral.
        torch.nn.init.normal_(weight, std=0.3)
    mechanism = GatedDeltaNet()
    options = {"value_size": VALUE, "chunk": 8, "key_heads": key_heads, "norm_eps": eps}
    ours = mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, head_dim=KEY))
    share = HEADS // key_heads
    sizes = [KEY, KEY, share * VALUE, share * VALUE]
    mixed = theirs.in_proj_qkvz.weight.unflatten(0, (key_heads, -1)).split(sizes, dim=1)
    strength, fade = (
        part.flatten(0, 1) for part in theirs.in_proj_ba.weight.unflatten(0, (key_heads, 2, share)).unbind(1)
    )
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


@pytest.mark.parametrize(("key_heads", "eps"), [(6, 1e-6), (2, 1e-3), (1, 1e-6)])
def test_the_layer_and_its_gradient_are_those_of_qwen3_next(record_property, key_heads, eps):
    torch.manual_seed(0)
    ours, theirs = pair(key_heads, eps)
    oracle = Agreement(record_property, "gated_deltanet", package="transformers Qwen3NextGatedDeltaNet")
    oracle.functions(ours, theirs, torch.randn(2, 70, WIDTH), tolerance=1e-4)  # theirs is float32 inside


def test_doubled_strengths_are_those_of_olmo_hybrid(record_property, monkeypatch):
    from transformers import OlmoHybridConfig
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid

    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        function = getattr(modeling_olmo_hybrid, name)
        monkeypatch.setattr(modeling_olmo_hybrid, name, getattr(function, "__wrapped__", function))
    torch.manual_seed(0)
    settings = OlmoHybridConfig(
        hidden_size=WIDTH, num_attention_heads=2, linear_num_key_heads=HEADS, linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY, linear_value_head_dim=VALUE, num_hidden_layers=2, rms_norm_eps=1e-6,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    theirs = modeling_olmo_hybrid.OlmoHybridGatedDeltaNet(settings, 0)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    mechanism = GatedDeltaNet()
    # The epsilon of their norm is 1e-5, whatever rms_norm_eps says.
    options = {"value_size": VALUE, "chunk": 8, "norm_eps": 1e-5, "allow_neg_eigval": True}
    ours = mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, head_dim=KEY))
    names = {"query": "q", "key": "k", "value": "v", "fade": "a", "strength": "b", "gate": "g", "output": "o"}
    with torch.no_grad():
        for mine, other in names.items():
            getattr(ours, mine).weight.copy_(getattr(theirs, f"{other}_proj").weight)
        ours.filters.copy_(theirs.conv1d.weight[:, 0])
        ours.rate.copy_(theirs.A_log)
        ours.fade_bias.copy_(theirs.dt_bias)
        ours.norm.copy_(theirs.o_norm.weight)
    oracle = Agreement(record_property, "gated_deltanet", package="transformers OlmoHybridGatedDeltaNet")
    oracle.functions(ours, theirs, torch.randn(2, 70, WIDTH), tolerance=1e-4)
