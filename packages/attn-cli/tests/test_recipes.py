"""Recipes as files."""

from __future__ import annotations

from typing import Any

import pytest
from attn_cli.recipe import located, read_recipe, recipe_names, recipe_under
from attn_core.errors import InvalidValue, UnknownName


def test_the_recipes_that_come_along_can_be_read():
    families = ["bottleneck", "luong", "rnnsearch", "transformer"]
    families_of = {name: name for name in families} | {"multi30k": "transformer", "multi30k-rnnsearch": "rnnsearch"}
    families_of |= {"gpt3": "gpt3", "sparse-transformer": "sparse_transformer", "retnet": "retnet_lm"}
    families_of |= {"key-value": "key_value_lm", "lstmn": "lstmn_lm", "turing-machine": "turing_machine"}
    families_of |= {"show-attend-tell": "show_attend_tell", "tagging": "tagger", "reformer": "reformer_lm"}
    families_of |= {"text-classifier": "text_classifier"}
    families_of |= dict.fromkeys(("bert", "bigbird", "linformer", "longformer", "performer"), "masked_lm")
    families_of |= dict.fromkeys(("vit-digits", "vit-mnist"), "vit")
    decoders = "deepseek gemma2 gemma3 glossary gpt2 llama mistral mixtral needle qwen3 qwen3-next recall"
    families_of |= dict.fromkeys(decoders.split(), "decoder")
    assert recipe_names() == sorted(families_of)
    for name, family in families_of.items():
        assert read_recipe(name).model.family == family


def under(recipe: str, **options: Any) -> dict[str, Any]:
    return recipe_under({"recipe": recipe, **options})


def test_a_recipe_for_a_folder_knows_what_lies_there(tmp_path):
    data = under("multi30k", dataset=str(tmp_path))["data"]
    assert (data["tokenizer"], data["languages"]) == ("byte_pairs:4000", "en-de")
    data = under("vit-mnist", dataset=str(tmp_path / "own.npz"))["data"]
    assert data["validation_fraction"] == 0.2


def test_a_dataset_by_name_has_no_tokenizer_of_the_recipe():
    data = under("multi30k", dataset="tatoeba-en-zh")["data"]
    assert not {"tokenizer", "languages"} & data.keys()


def test_a_path_is_made_absolute_and_a_name_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("to be")
    assert located("mine.txt") == str(tmp_path / "mine.txt")
    assert located("./other.txt") == str(tmp_path / "other.txt")
    assert located("shakespeare") == "shakespeare"


def test_a_file_of_ones_own_is_a_recipe(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nhidden_size = 8\n[data]\ndataset = "/x"\n')
    assert read_recipe(str(file)).model.hidden_size == 8


def test_what_is_no_recipe_is_named(tmp_path):
    with pytest.raises(UnknownName, match="rnnsearch"):
        read_recipe("rnnserach")
    bad = {"[model\n": "TOML|config", "[model]\nhiden_size = 3\n": "hidden_size"}
    bad |= {"[model]\nhidden_size = 'x'\n": "hidden_size", "[optimizer]\nsteps = 0\n": "steps"}
    for content, said in bad.items():
        file = tmp_path / "bad.toml"
        file.write_text(content)
        with pytest.raises((InvalidValue, UnknownName), match=said):
            read_recipe(str(file))


def test_null_leaves_an_option_out(tmp_path):
    assert read_recipe("gemma2").model.model_options["pattern"][0]["options"]["norm_eps"] is None
    file = tmp_path / "mine.toml"
    file.write_text('[model.model_options]\npattern = [{ mechanism = "x", options = { rotary = "null" } }]\n')
    assert read_recipe(str(file)).model.model_options["pattern"][0]["options"]["rotary"] is None


def test_a_mechanism_replaces_that_of_a_recipe_with_its_options():
    model = under("gemma2", mechanism="linear")["model"]
    assert "pattern" not in model["model_options"]
    assert "options" not in under("mistral", mechanism="bigbird")["model"]
    assert under("mistral")["model"]["options"]


def test_fewer_steps_warm_up_no_longer_than_they_last():
    assert under("bert", steps=20)["optimizer"]["warmup_steps"] == 20
