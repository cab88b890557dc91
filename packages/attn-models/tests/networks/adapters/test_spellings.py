"""A config.json may be spelled in every way that transformers reads; its own config classes say what is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attn_core.errors import InvalidValue, UserError
from attn_models.adapters.base import Layout
from attn_models.adapters.hf_config import IGNORED_KEYS, adapter_config, without_aliases
from attn_models.adapters.registry import decoder_adapter, installed_adapters
from attn_testing.families import FAMILIES

transformers = pytest.importorskip("transformers")

OUTSIDE = ("rope_theta", "partial_rotary_factor")
LINEAR = {"rope_type": "linear", "factor": 2.0}


def meant(values):
    """The same config as transformers writes it, in the names of its version 5; None where it is invalid there."""
    try:
        read = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))
        return json.loads(read.to_json_string(use_diff=False))
    except Exception:  # noqa: BLE001  (whatever they raise for a config that means nothing)
        return None


def read(values):
    return adapter_config(decoder_adapter(values["model_type"]), values, Path("config.json"))


def older(rope, *, word):
    """`rope_parameters` as transformers 4 wrote them."""
    scaling = {word if key == "rope_type" else key: value for key, value in rope.items() if key not in OUTSIDE}
    outside = {key: rope[key] for key in OUTSIDE if key in rope}
    return outside | {"rope_scaling": None if rope["rope_type"] == "default" else scaling}


def ropes(rope):
    """Ways to write rotary positions, by a word for each."""
    yield "none", {}
    yield "older name", {"rope_scaling": rope}
    yield "both names", {"rope_scaling": rope, "rope_parameters": rope}
    if "rope_type" in rope:
        yield "older", older(rope, word="rope_type")
        yield "oldest", older(rope, word="type")
        yield "type", {"rope_parameters": {"type" if key == "rope_type" else key: rope[key] for key in rope}}
        yield "base in scaling", {"rope_scaling": LINEAR | {"rope_theta": 999.0}}
        yield "linear", {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
        yield "without a type", {"rope_scaling": {"factor": 2.0}}
        for key, value in (("rope_theta", 999.0), ("partial_rotary_factor", 0.5)):
            less = {own: rope[own] for own in rope if own != key}
            yield f"{key} outside", {"rope_parameters": less, key: value}
            yield f"{key} inside", {"rope_parameters": rope | {key: value}}
    else:
        yield "scaled", {"rope_scaling": LINEAR}
        yield "one kind", {"rope_parameters": dict(list(rope.items())[:1])}
    for key in ("rope_theta", "rotary_emb_base", "rope_local_base_freq", "local_rope_theta"):
        yield f"{key} alone", {key: 999.0}
        yield f"{key} beside", {key: 999.0, "rope_parameters": rope}
    yield "rotary_pct", {"rotary_pct": 0.5}


def spellings(values):
    for alias, key in transformers.CONFIG_MAPPING[values["model_type"]].attribute_map.items():
        if key in values:
            rest = {name: value for name, value in values.items() if name not in (alias, key)}
            yield f"{alias} for {key}", rest | {alias: values[key]}
            yield f"{alias} and {key}", rest | {alias: values[key], key: values[key]}
    if values.get("rope_parameters"):
        rest = {name: value for name, value in values.items() if name != "rope_parameters"}
        yield from ((word, rest | own) for word, own in ropes(values["rope_parameters"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_means_what_it_means_to_transformers_however_it_is_spelled(family):
    compared = set()
    for sizes in FAMILIES[family].values():
        plain = meant(transformers.AutoConfig.for_model(family, **sizes).to_dict() | {"model_type": family})
        for word, values in spellings(plain):
            theirs = meant(values)
            try:
                expected = None if theirs is None else read(theirs)
            except UserError:
                continue
            if expected is None or (family == "olmo3" and word.startswith("rope_theta")):
                continue  # transformers 4 and 5 differ about a base of OLMo 3 at the top level, so that it is refused
            assert read(values) == expected, word
            compared.add(word)
    assert len(compared) >= 10 or not plain.get("rope_parameters")


LAYOUTS = installed_adapters(Layout)


@pytest.mark.parametrize("family", sorted(LAYOUTS.keys() & transformers.CONFIG_MAPPING.keys()))
def test_every_other_name_that_transformers_has_for_a_key_is_understood_and_may_not_contradict_it(family):
    layout = LAYOUTS[family]
    known = layout.known_keys | layout.aliases.keys()
    for alias, key in transformers.CONFIG_MAPPING[family].attribute_map.items():
        unused = IGNORED_KEYS.fullmatch(alias) or {alias, key} <= layout.known_keys
        if key in known and not unused:
            named = layout.aliases.get(alias, alias)
            assert without_aliases({alias: 3}, layout.aliases) == without_aliases({key: 3}, layout.aliases)
            assert without_aliases({alias: 3, key: 3}, layout.aliases) == {named: 3}
            with pytest.raises(InvalidValue, match="another name"):
                without_aliases({alias: 3, key: 4}, layout.aliases)
