"""A plugin that calls its things by names of ours harms nothing of ours: defaults, recipes and sizes name in full."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from attn_cli.main import application
from attn_cli.recipe import read_recipe, recipe_names
from attn_core import installed
from attn_core.errors import AmbiguousName
from attn_core.plugins.catalog import BUILT_IN
from attn_engine.build import build_engine
from attn_models.loading import load_model, save_model
from attn_schema.engine import EngineConfig
from attn_train.data.load import family_named
from attn_variants import MultiheadAttention
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
KINDS = ("mechanisms", "kernels", "linears", "caches", "models")
OURS = ("attn-variants/", "attn-models/", "attn-cache/", "attn-gated", "attn-recurrent")
SIZES = {"vocab_size": 19, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 16}


@pytest.fixture(autouse=True)
def _rival():
    """A plugin that has a thing of each name that is taken, for as long as a test lasts."""
    registries = [getattr(installed(), kind) for kind in KINDS]
    taken = [dict(registry._items) for registry in registries]
    for registry in registries:
        for item in list(registry):
            if f"attn-rival/{item.name}" not in registry._items:
                registry.register(copy.copy(item), "attn-rival")
    yield
    for registry, items in zip(registries, taken, strict=True):
        registry._items = items


def test_a_built_in_name_stays_its_own():
    for kind in KINDS:
        registry = getattr(installed(), kind)
        for full in registry.names():
            owner, _, short = registry.full_name(full).rpartition("/")
            if owner in BUILT_IN:
                assert registry.full_name(short) == f"{owner}/{short}"


def test_a_short_name_of_two_plugins_is_refused_with_both():
    with pytest.raises(AmbiguousName, match=r"attn-gated/gated, attn-rival/gated"):
        installed().mechanisms.get("gated")


def test_what_is_built_in_are_the_packages_and_services_with_plugins():
    manifests = [path for folder in ("packages", "services") for path in (ROOT / folder).glob("*/pyproject.toml")]
    assert {path.parent.name for path in manifests if '"attn.plugins"' in path.read_text("utf-8")} == BUILT_IN


def test_the_sizes_of_known_models_name_their_mechanism_in_full():
    for shape in installed().shapes:
        assert installed().mechanisms.full_name(shape.mechanism).startswith(OURS)


def test_costs_of_a_known_model_are_printed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["attn", "cost", "gpt2"])
    shown = CliRunner().invoke(application(), ["cost", "gpt2"])
    assert shown.exit_code == 0, shown.output
    assert "mha" in shown.output


def test_configs_of_models_name_their_mechanisms_in_full():
    configs = {getattr(family, "Config", None) for family in installed().models} - {None}
    fields = [field for config in configs for field in dataclasses.fields(config)]
    named = [f.default for f in fields if f.name in ("mechanism", "encoder", "decoder", "cross")]
    assert named
    for default in named:
        assert installed().mechanisms.full_name(default).startswith(OURS)


@pytest.mark.parametrize("recipe", recipe_names())
def test_recipes_name_their_mechanisms_in_full(recipe):
    model = read_recipe(recipe).model.with_defaults()
    patterns = [choice["mechanism"] for choice in model.model_options.get("pattern", [])]
    for name in [*patterns, *([model.mechanism] if model.mechanism else [])]:
        assert installed().mechanisms.full_name(name).startswith(OURS)


def test_a_decoder_of_defaults_is_built_saved_loaded_and_served(tmp_path):
    torch.manual_seed(0)
    family = family_named("decoder")
    model = family.build(family.configure(SIZES)).eval()
    save_model(tmp_path / "model", model)
    loaded = load_model(tmp_path / "model")
    tokens = torch.arange(6)[None]
    assert torch.equal(loaded.model(tokens), model(tokens))
    build_engine(loaded.model, config=EngineConfig(), kv_cache_tokens=32)


@pytest.mark.parametrize("name", ["gpt3", "sparse_transformer", "retnet_lm"])
def test_decoders_of_papers_are_built(name):
    family = installed().models.get(f"attn-models/{name}")
    assert family.build(family.configure(SIZES)) is not None


def test_the_stand_in_for_torchs_module_is_built():
    assert MultiheadAttention(8, 2).mechanism is installed().mechanisms.get("attn-variants/mha")
