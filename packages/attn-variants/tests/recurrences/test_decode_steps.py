"""What recurrences ask of kernels for a decode step, and the layers of an input joined to one."""

from __future__ import annotations

import copy

import pytest
import torch
from attn_core import Rotary, configure, installed
from attn_testing import DictionaryStore
from attn_testing.serving import ragged
from attn_variants.mechanisms.recurrence_layers import Projections
from torch import nn

EXPECTED_STEPS = {
    "linear": {"feature_map": "elu_plus_one", "normalizer": True},
    "retnet": {"rotary": "pairs", "decay": "head", "value_size": 16, "norm_heads": 1, "gate": "silu"},
    "lightning": {"feature_map": "silu", "decay": "head", "norm_heads": 2, "gate": "sigmoid"},
    "gla": {"key_size": 4, "decay": "channel", "decay_form": "log_sigmoid", "norm_heads": 1, "gate": "silu"},
    "deltanet": {"taps": 4, "feature_map": "silu", "unit": True, "delta_rule": True, "norm_heads": 1},
    "kda": {
        "taps": 4,
        "feature_map": "silu",
        "unit": True,
        "decay": "channel",
        "decay_form": "softplus",
        "delta_rule": True,
        "norm_heads": 1,
        "gate": "sigmoid",
    },
}
"""By mechanism what differs from a plain recurrence, over two heads of 8."""
OPTIONS = {
    "retnet": [{"base": None}, {"scale_base": 512.0}, {"value_size": 5}],
    "deltanet": [{"convolution": 0}, {"convolution": 1}],
    "kda": [
        {"convolution": 2, "key_size": 6},
        {"rank": 0},
        {"key_heads": 1},
        {"rank": 3, "gate_bias": True},
        {"lower_bound": -5.0},
    ],
    "gla": [{"key_size": 3, "value_size": 7}],
    "linear": [{}],
    "lightning": [{"slope_factor": 0.5}],
}


def config_of(name: str, options=None, **more):
    return configure(
        installed().mechanisms.get(name), options or {}, **{"hidden_size": 16, "num_heads": 2, "causal": True} | more
    )


@pytest.mark.parametrize("name", EXPECTED_STEPS)
def test_what_a_step_asks_is_what_its_equation_says(name):
    asked = installed().mechanisms.get(name).recurrent_step(config_of(name))
    plain = {"num_heads": 2, "num_key_heads": 2, "key_size": 8, "value_size": 8}
    assert asked == type(asked)(**{**plain, **EXPECTED_STEPS[name]})


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in OPTIONS for options in OPTIONS[name]], ids=str
)
def test_a_layer_asks_what_its_mechanism_says_with_any_options(name, options):
    mechanism, config = installed().mechanisms.get(name), config_of(name, options)
    assert mechanism.build(config).step_spec == mechanism.recurrent_step(config)


def test_positions_of_the_model_are_asked_for_as_they_turn():
    mechanism = installed().mechanisms.get("retnet")
    config = config_of("retnet", rotary=Rotary(interleaved=False))
    assert mechanism.recurrent_step(config).rotary == mechanism.build(config).step_spec.rotary == "halves"


def test_where_the_order_is_ignored_or_features_are_random_nothing_is_asked():
    for name, more in (
        ("linear", {"causal": False}),
        ("performer", {}),
        ("performer", {"options": {"kernel": "relu"}}),
    ):
        mechanism, config = installed().mechanisms.get(name), config_of(name, **more)
        assert mechanism.recurrent_step(config) is None
        assert mechanism.build(config).step_spec is None


def side_by_side(layers) -> nn.Linear:
    """Layers of one input as one, with zeros for the biases of those without."""
    whole = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers)).double()
    biases = [torch.zeros(layer.out_features).double() if layer.bias is None else layer.bias for layer in layers]
    with torch.no_grad():
        whole.weight.copy_(torch.cat([layer.weight for layer in layers]))
        whole.bias.copy_(torch.cat(biases))
    return whole


def stepped(layer, mechanism, config, rows) -> torch.Tensor:
    """Prompts of 5 and 1 tokens, then a token of each."""
    store, done, outs = DictionaryStore({"layer": mechanism.state(config)}), [0, 0], []
    for request in range(2):
        store.admit(request)
    for lengths in ([5, 1], [1, 1], [1, 3]):
        batch = ragged(lengths, done)
        new = torch.cat([rows[i, d : d + n] for i, (d, n) in enumerate(zip(done, lengths, strict=True))])
        with torch.no_grad():
            outs.append(layer.step(new, batch, store.view(batch, [0, 1])["layer"]))
        done = [a + b for a, b in zip(done, lengths, strict=True)]
    return torch.cat(outs)


@pytest.mark.parametrize("bias", [False, True], ids=["without biases", "with biases"])
@pytest.mark.parametrize("name", [*EXPECTED_STEPS, "performer"])
def test_layers_that_are_joined_compute_the_same_whole_and_in_steps(name, bias):
    torch.manual_seed(0)
    mechanism, config = installed().mechanisms.get(name), config_of(name, bias=bias)
    layer = mechanism.build(config).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    joined = copy.deepcopy(layer)
    joined.join(lambda layers: layers[0] if len(layers) == 1 else side_by_side(layers))
    rows = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(joined(rows), layer(rows), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(joined.weights(rows), layer.weights(rows), rtol=1e-10, atol=1e-12)
    one, other = (stepped(made, mechanism, config, rows) for made in (joined, layer))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_joined_layers_are_multiplied_once_a_step(name):
    mechanism, config = installed().mechanisms.get(name), config_of(name)
    layer, calls = mechanism.build(config).double().eval(), []
    layer.join(lambda layers: layers[0] if len(layers) == 1 else side_by_side(layers))
    layer.joint.whole.register_forward_hook(lambda *_: calls.append(1))
    rows = torch.randn(2, 9, 16, dtype=torch.float64)
    layer(rows)
    assert len(calls) == 1
    stepped(layer, mechanism, config, rows)
    assert len(calls) == 1 + 3
    part = layer.fade[0](rows)
    assert torch.equal(part, Projections(layer, rows)["fade.0"])
