"""Rotary positions stretched to longer sequences."""

import math

import pytest
import torch
from attn_core import Rotary, configure, installed
from attn_core.errors import InvalidValue, UnknownName
from attn_core.rotary import LongRope, Yarn, rotary_scaling
from attn_variants.compute.rotary import cos_sin_of

SIZE = 16
SHORT, LONG = [1.0 + i / 10 for i in range(8)], [1.0 + 2 * i for i in range(8)]
PEERS = {
    "linear": ({"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}, None),
    "dynamic": (
        {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64, "length": 200},
        {"rope_type": "dynamic", "factor": 2.0},
        200,
    ),
    "dynamic, short": (
        {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64, "length": 40},
        {"rope_type": "dynamic", "factor": 2.0},
        40,
    ),
    "yarn": (
        {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        None,
    ),
    "yarn, own ends": (
        {
            "kind": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "fast": 16,
            "slow": 2,
            "attention": 1.5,
            "whole_pairs": False,
        },
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.5,
            "truncate": False,
        },
        None,
    ),
    "llama3": (
        {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        None,
    ),
    "longrope": (
        {"kind": "longrope", "short": SHORT, "long": LONG, "original_max_position_embeddings": 64, "length": 256},
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        256,
    ),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", PEERS)
def test_frequencies_and_attention_factor_are_those_of_transformers(agrees, name):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    words, theirs, length = PEERS[name]
    config = LlamaConfig(
        hidden_size=2 * SIZE,
        num_attention_heads=2,
        head_dim=SIZE,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **theirs},
    )
    if "long" in name:
        config.original_max_position_embeddings = 64
    expected, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"), seq_len=length)
    rotary = Rotary(scaling=rotary_scaling(words))
    found = torch.tensor(rotary.frequencies(SIZE), dtype=torch.float64)
    # transformers takes its frequencies in float32.
    assert torch.allclose(found, expected.double(), rtol=1e-6, atol=0)
    agrees("rope", package=f"transformers rotary frequencies, {theirs['rope_type']}").outputs(
        found, expected.double(), 1e-6
    )
    if name != "longrope":
        assert rotary.attention_factor == pytest.approx(factor, rel=1e-12)


def test_linear_scaling_puts_every_position_where_a_fraction_of_it_was():
    scaled = Rotary(scaling=rotary_scaling({"kind": "linear", "factor": 4}))
    stretched = cos_sin_of(scaled, SIZE, torch.arange(0, 40, 4), torch.float64)
    plain = cos_sin_of(Rotary(), SIZE, torch.arange(10), torch.float64)
    assert torch.allclose(stretched.cosines, plain.cosines, rtol=0, atol=1e-15)
    assert torch.allclose(stretched.sines, plain.sines, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "words",
    [
        {"kind": "linear", "factor": 1},
        {"kind": "dynamic", "factor": 4, "original_max_position_embeddings": 64, "length": 64},
        {"kind": "yarn", "factor": 1, "original_max_position_embeddings": 64},
        {"kind": "llama3", "factor": 1, "original_max_position_embeddings": 64},
        {"kind": "longrope", "short": [1] * 8, "long": LONG, "original_max_position_embeddings": 64, "length": 64},
    ],
    ids=lambda words: words["kind"],
)
def test_scaling_by_nothing_changes_nothing(words):
    rotary = Rotary(scaling=rotary_scaling(words))
    assert rotary.frequencies(SIZE) == pytest.approx(Rotary().frequencies(SIZE), rel=1e-15)
    assert rotary.attention_factor == 1


def test_yarn_keeps_the_fast_pairs_slows_the_slow_ones_and_multiplies_scores(build):
    plain, scaled = (
        Rotary().frequencies(64),
        Rotary(scaling=Yarn(factor=4, original_max_position_embeddings=4096)).frequencies(64),
    )
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4)
    layer = build(
        "rope",
        {"scaling": {"kind": "yarn", "factor": 4, "original_max_position_embeddings": 4096}},
        hidden_size=16,
        num_heads=2,
    )
    other = build(
        "rope",
        {"scaling": {"kind": "yarn", "factor": 4, "original_max_position_embeddings": 4096, "attention": 1}},
        hidden_size=16,
        num_heads=2,
    )
    rows = torch.randn(1, 5, 16, dtype=torch.float64)
    other.load_state_dict({**layer.state_dict(), "query.weight": layer.query.weight * (0.1 * math.log(4) + 1) ** 2})
    assert torch.allclose(layer(rows), other(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "error", "named"),
    [
        ("yarn", InvalidValue, "scaling"),
        ({"factor": 2}, InvalidValue, "kind"),
        ({"kind": "yearn", "factor": 2}, UnknownName, "yarn"),
        ({"kind": "linear", "factor": 0.5}, InvalidValue, "factor"),
        ({"kind": "linear", "factor": float("nan")}, InvalidValue, "factor"),
        ({"kind": "linear", "faktor": 2}, UnknownName, "factor"),
        ({"kind": "yarn", "factor": 2}, InvalidValue, "original_max_position_embeddings"),
        ({"kind": "yarn", "factor": 2, "original_max_position_embeddings": 64, "slow": 40}, InvalidValue, "slow"),
        (
            {"kind": "llama3", "factor": 2, "original_max_position_embeddings": 1},
            InvalidValue,
            "original_max_position_embeddings",
        ),
        (
            {"kind": "longrope", "short": [0], "long": [1], "original_max_position_embeddings": 8, "length": 9},
            InvalidValue,
            "short",
        ),
    ],
)
def test_bad_scalings_are_refused_by_name(words, error, named):
    with pytest.raises(error, match=named):
        configure(installed().mechanisms.get("rope"), {"scaling": words}, hidden_size=8)


def test_longrope_wants_a_factor_for_each_pair():
    scaling = LongRope(short=(1.0,), long=(1.0,), original_max_position_embeddings=8, length=16)
    with pytest.raises(InvalidValue, match="1 factors"):
        Rotary(scaling=scaling).frequencies(SIZE)


def test_proportional_turns_the_first_pairs_of_a_whole_head_and_leaves_the_rest():
    rotary = Rotary(base=100.0, scaling=rotary_scaling({"kind": "proportional", "fraction": 0.3, "factor": 2.0}))
    assert rotary.frequencies(16) == pytest.approx([0.5, 0.5 * 100 ** (-1 / 8), *[0.0] * 6])
    whole = Rotary(base=100.0, scaling=rotary_scaling({"kind": "proportional", "fraction": 1.0}))
    assert whole.frequencies(16) == Rotary(base=100.0).frequencies(16)
    with pytest.raises(InvalidValue, match="fraction"):
        rotary_scaling({"kind": "proportional", "fraction": 1.5})
