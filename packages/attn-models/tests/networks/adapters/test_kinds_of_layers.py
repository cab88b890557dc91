"""The tiny configs with which families are compared have every kind of layer that their families have."""

from __future__ import annotations

from pathlib import Path

import pytest
from attn_core.errors import UserError
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.adapters.registry import decoder_adapter
from attn_models.attention import layer_attentions
from attn_testing.config_changes import changes
from attn_testing.families import FAMILIES

transformers = pytest.importorskip("transformers")

BUILT_BY_NOBODY = {"deepseek_v2"}
"""Families whose defaults describe no model in transformers either."""


def kinds_of(family, values):
    """What distinguishes the layers of a config.json from each other: the parts of their attention, without numbers,
    and whether they have experts. Raises `UserError` where it is refused."""
    adapter = decoder_adapter(family)
    check_unread_keys(values, adapter.known_keys, Path("config.json"))
    config = adapter.from_hf_config(values)
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
