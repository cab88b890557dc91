"""What a decoder's config refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import json

import pytest
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_models.attention import layer_attentions
from attn_schema.decoder import DecoderConfig

NEEDED = {"vocab_size": 31, "max_seq_len": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize("field", NEEDED)
def test_a_needed_field_that_is_not_given_is_named(field):
    with pytest.raises(InvalidValue, match=field):
        DecoderConfig.from_plain({name: value for name, value in NEEDED.items() if name != field})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", 2.5),
        ("hidden_size", True),
        ("hidden_size", "16"),
        ("num_heads", -4),
        ("num_heads", 3),
        ("intermediate_size", 0),
        ("norm", "batch"),
        ("norm_place", "middle"),
        ("norm_eps", -1.0),
        ("norm_eps", float("nan")),
        ("feed_forward", "tanh"),
        ("positions", "spiral"),
        ("rope_theta", 0),
        ("partial_rotary_factor", 1.5),
        ("dropout", 1.0),
        ("dropout", float("inf")),
        ("attention_dropout", -0.1),
        ("attention_dropout", 1),
        ("attention_dropout", float("nan")),
        ("attention_dropout", "0.1"),
        ("tie_word_embeddings", "yes"),
        ("pattern", [3]),
        ("pattern", [{"mechanism": "mha", "option": {}}]),
        ("options", [1]),
        ("mechanism", 7),
        ("num_experts", 0),
        ("num_experts_per_tok", 2),
        ("router_aux_loss_coef", 0.1),
        ("router_aux_loss_coef", -1.0),
        ("routing", "hash"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(field, value):
    with pytest.raises(InvalidValue, match=field) as caught:
        DecoderConfig.from_plain(NEEDED | {field: value})
    assert "allowed: " in str(caught.value)


def test_an_unknown_field_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'hidden_size'"):
        DecoderConfig.from_plain(NEEDED | {"hiden_size": 16})


def test_a_config_survives_json_and_floats_for_whole_numbers():
    config = DecoderConfig(**NEEDED, pattern=(), options={"window": 3}, norm="rms")
    again = DecoderConfig.from_plain(json.loads(json.dumps(config.plain())))
    assert again == config
    assert DecoderConfig.from_plain(NEEDED | {"num_layers": 2.0}).num_layers == 2


def test_the_inner_width_is_four_widths_or_a_multiple_of_eight_near_eight_thirds():
    assert DecoderConfig(**NEEDED).inner_width == 64
    assert DecoderConfig(**NEEDED, feed_forward="swiglu").inner_width == 48
    assert DecoderConfig(**NEEDED | {"hidden_size": 1536}, feed_forward="swiglu").inner_width == 4096


def test_an_unknown_mechanism_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="unknown mechanism 'mhaa'; did you mean 'mha'"):
        layer_attentions(DecoderConfig(**NEEDED, mechanism="mhaa"))


def test_an_unknown_option_names_its_mechanism():
    with pytest.raises(UnknownName, match="option of mechanism 'mha'"):
        layer_attentions(DecoderConfig(**NEEDED, options={"no_such_option": 1}))


@pytest.mark.usefixtures("strangers")
def test_a_mechanism_that_cannot_be_causal_is_refused_with_those_that_can():
    with pytest.raises(Incompatible, match=r"'two_sided_mean' cannot be causal.*mha.*running_mean"):
        layer_attentions(DecoderConfig(**NEEDED, mechanism="two_sided_mean"))


@pytest.mark.usefixtures("strangers")
def test_rotary_positions_are_refused_where_the_mechanism_has_none():
    with pytest.raises(Incompatible, match=r"'running_mean' takes no rotary positions.*mha") as caught:
        layer_attentions(DecoderConfig(**NEEDED, mechanism="running_mean", positions="rotary"))
    assert "running_mean" not in str(caught.value).partition("these can:")[2]


@pytest.mark.usefixtures("strangers")
def test_fewer_key_heads_are_refused_where_the_mechanism_cannot_share_them():
    with pytest.raises(Incompatible, match="'running_mean' needs 4 key/value heads"):
        layer_attentions(DecoderConfig(**NEEDED, mechanism="running_mean", num_kv_heads=2))


@pytest.mark.usefixtures("strangers")
def test_a_pattern_repeats_over_the_layers():
    config = DecoderConfig.from_plain(
        NEEDED | {"num_layers": 5, "pattern": ["mha", {"mechanism": "running_mean", "options": {"decay": 0.5}}]}
    )
    attentions = layer_attentions(config)
    names = [attention.mechanism.name for attention in attentions]
    assert names == ["mha", "running_mean", "mha", "running_mean", "mha"]
    assert attentions[1].config.decay == 0.5


def test_the_family_checks_the_mechanism_too():
    family = installed().models.get("decoder")
    with pytest.raises(UnknownName, match="unknown mechanism 'nothing'"):
        family.configure(NEEDED | {"mechanism": "nothing"})


@pytest.mark.usefixtures("strangers")
def test_layers_can_leave_out_the_rotary_positions_that_others_have():
    turned = DecoderConfig.from_plain(
        NEEDED
        | {
            "positions": "rotary",
            "num_layers": 3,
            "pattern": [
                "mha",
                {"mechanism": "mha", "options": {"rotary": None}},
                {"mechanism": "running_mean", "options": {"rotary": None}},
            ],
        }
    )
    assert [attention.config.rotary for attention in layer_attentions(turned)] == [turned.rotary, None, None]
    assert DecoderConfig.from_plain(turned.plain()) == turned


@pytest.mark.usefixtures("strangers")
def test_layers_can_change_the_rotary_positions_that_others_have():
    own = {"mechanism": "mha", "options": {"rotary": {"base": 5.0, "fraction": 0.5}}}
    turned = DecoderConfig.from_plain(NEEDED | {"positions": "rotary", "num_layers": 2, "pattern": ["mha", own]})
    usual, changed = [attention.config.rotary for attention in layer_attentions(turned)]
    assert usual == turned.rotary
    assert changed == dataclasses.replace(turned.rotary, base=5.0, fraction=0.5)
    assert DecoderConfig.from_plain(turned.plain()) == turned
    stranger = own | {"mechanism": "running_mean"}
    with pytest.raises(Incompatible, match="'running_mean' takes no rotary positions"):
        layer_attentions(DecoderConfig.from_plain(NEEDED | {"positions": "rotary", "pattern": [stranger]}))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("given", [10000, False, {"theta": 5.0}, {"base": 0.5}, {"fraction": 2.0}])
def test_a_layer_cannot_be_told_to_turn_in_an_unknown_way(positions, given):
    choice = {"mechanism": "mha", "options": {"rotary": given}}
    with pytest.raises(InvalidValue, match="rotary"):
        layer_attentions(DecoderConfig.from_plain(NEEDED | {"positions": positions, "pattern": [choice]}))


@pytest.mark.parametrize("given", [{"base": 5.0}, {}])
def test_a_layer_cannot_turn_in_a_model_without_rotary_positions(given):
    choice = {"mechanism": "mha", "options": {"rotary": given}}
    with pytest.raises(InvalidValue, match="in a model with rotary positions"):
        layer_attentions(DecoderConfig.from_plain(NEEDED | {"pattern": [choice]}))
