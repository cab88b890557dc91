"""The tiny configs with which families are compared have every kind of layer that their families have."""

from __future__ import annotations

from pathlib import Path

import pytest
from attn_core.errors import UserError
from attn_models.adapters.hf_config import adapter_config
from attn_models.adapters.registry import decoder_adapter
from attn_models.attention import layer_attentions
from attn_testing.config_changes import changes
from attn_testing.families import FAMILIES

transformers = pytest.importorskip("transformers")

BUILT_BY_NOBODY = {"deepseek_v2"}
"""Families whose defaults describe no model in transformers either."""
COUNTS = ("num_hidden_layers", "n_layer", "n_layers")


def kinds_of(family, values):
    """What distinguishes the layers of a config.json from each other: the parts of their attention, without numbers,
    and whether they have experts. Raises `UserError` where it is refused."""
    config = adapter_config(decoder_adapter(family), values, Path("config.json"))
    found = set()
    for layer, attention in enumerate(layer_attentions(config)):
        spec = attention.mechanism.spec(attention.config)
        if spec is None:
            found.add(attention.full_name)
        else:
            parts = (spec.score, spec.mask, spec.distribution, spec.norm, spec.rotary, *spec.modifiers)
            found.add(tuple(type(part).__name__ for part in parts))
        found.add("experts" if config.is_sparse(layer) else "dense")
    return found


def whole(family, sizes):
    return transformers.AutoConfig.for_model(family, **sizes).to_dict()


def covered(family):
    return set().union(*(kinds_of(family, whole(family, sizes)) for sizes in FAMILIES[family].values()))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - BUILT_BY_NOBODY))
def test_the_configs_of_a_family_have_every_kind_of_layer_that_its_default_config_has(family):
    assert kinds_of(family, whole(family, {})) <= covered(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_change_of_a_config_gives_a_kind_of_layer_that_no_config_of_the_family_has(family):
    missing, known = {}, covered(family)
    for sizes in FAMILIES[family].values():
        for words, values in changes(whole(family, sizes)):
            try:
                found = kinds_of(family, values)
            except UserError:
                continue
            missing |= dict.fromkeys(found - known, words)
    assert not missing


def attentions(family, values):
    """The attention of each layer of a config.json; None where it is refused."""
    try:
        config = decoder_adapter(family).from_hf_config(values)
    except UserError:
        return None
    return [config.choice(layer) for layer in range(config.num_layers)]


@pytest.mark.parametrize("period", [{}, {"sliding_window_pattern": 3}, {"no_rope_layer_interval": 3}], ids=str)
def test_layers_that_a_config_does_not_list_are_those_that_transformers_lists(period):
    """Of seven layers, as many as no period divides."""
    compared, wrong = set(), []
    for family, cases in FAMILIES.items():
        sizes = {name: value for name, value in cases[""].items() if name != "layer_types"}
        listed = whole(family, sizes | period | {key: 7 for key in COUNTS if key in sizes})
        if listed.get("layer_types"):
            compared.add(family)
            unlisted = {name: value for name, value in listed.items() if name != "layer_types"} | period
            wrong += [family] if attentions(family, listed) != attentions(family, unlisted) else []
    assert not wrong
    assert compared >= {"cohere2", "exaone4", "gemma3_text", "gpt_oss", "olmo3", "smollm3"}
