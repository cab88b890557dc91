"""Recipes as files."""

from __future__ import annotations

import pytest
from attn_client.commands.train import changed
from attn_client.recipe import read_recipe, recipe_names
from attn_core.errors import InvalidValue, UnknownName


def test_the_recipes_that_come_along_can_be_read():
    families = ["bottleneck", "luong", "rnnsearch", "transformer"]
    families_of = {name: name for name in families} | {"multi30k": "transformer", "multi30k-rnnsearch": "rnnsearch"}
    families_of |= {"gpt3": "gpt3", "sparse-transformer": "sparse_transformer", "retnet": "retnet_lm"}
    families_of |= {"key-value": "key_value_lm", "lstmn": "lstmn_lm", "turing-machine": "turing_machine"}
    families_of |= {"show-attend-tell": "show_attend_tell"}
    assert recipe_names() == sorted(families_of)
    for name, family in families_of.items():
        assert read_recipe(name).model.family == family


def test_a_recipe_for_a_folder_knows_what_lies_there(tmp_path):
    spec = changed(read_recipe("multi30k"), str(tmp_path), "", "", None, 0)
    assert (spec.data.path, spec.data.tokenizer, spec.data.languages) == (str(tmp_path), "byte_pairs:4000", "en-de")
    other = changed(read_recipe("multi30k"), str(tmp_path), "word", "de-en", None, 0)
    assert (other.data.tokenizer, other.data.languages) == ("word", "de-en")


def test_a_file_of_ones_own_is_a_recipe(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nwidth = 8\n[data]\npath = "/x"\n')
    assert read_recipe(str(file)).model.width == 8


def test_the_command_line_changes_data_steps_seed_and_precision(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("a\tb\n")
    spec = changed(read_recipe("luong"), str(file), "word", "", 7, 4)
    assert (spec.data.path, spec.data.tokenizer, spec.optimizer.steps, spec.seed) == (str(file), "word", 7, 4)
    assert changed(read_recipe("luong"), "", "", "", None, 0, "bfloat16").precision == "bfloat16"
    same = changed(read_recipe("luong"), "", "", "", None, 0)
    assert same == read_recipe("luong")


def test_what_is_no_recipe_is_named(tmp_path):
    with pytest.raises(UnknownName, match="rnnsearch"):
        read_recipe("rnnserach")
    for content, said in (("[model\n", "TOML"), ("[model]\nwdith = 3\n", "wdith"), ("[model]\nwidth = 'x'\n", "width")):
        file = tmp_path / "bad.toml"
        file.write_text(content)
        with pytest.raises(InvalidValue, match=said):
            read_recipe(str(file))
