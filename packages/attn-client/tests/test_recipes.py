"""Recipes as files."""

from __future__ import annotations

import pytest
from attn_client.commands.changes import Changes, changed
from attn_client.recipe import read_recipe, recipe_names
from attn_core.errors import InvalidValue, UnknownName


def test_the_recipes_that_come_along_can_be_read():
    families = ["bottleneck", "luong", "rnnsearch", "transformer"]
    families_of = {name: name for name in families} | {"multi30k": "transformer", "multi30k-rnnsearch": "rnnsearch"}
    families_of |= {"gpt3": "gpt3", "sparse-transformer": "sparse_transformer", "retnet": "retnet_lm"}
    families_of |= {"key-value": "key_value_lm", "lstmn": "lstmn_lm", "turing-machine": "turing_machine"}
    families_of |= {"show-attend-tell": "show_attend_tell", "tagging": "tagger", "reformer": "reformer_lm"}
    families_of |= dict.fromkeys(("bert", "bigbird", "linformer", "longformer", "performer"), "masked_lm")
    families_of |= dict.fromkeys(("vit-digits", "vit-mnist"), "vit")
    decoders = "deepseek gemma2 gemma3 glossary gpt2 llama mistral mixtral needle qwen3 qwen3-next recall"
    families_of |= dict.fromkeys(decoders.split(), "")
    assert recipe_names() == sorted(families_of)
    for name, family in families_of.items():
        assert read_recipe(name).model.family == family


def test_a_recipe_for_a_folder_knows_what_lies_there(tmp_path):
    spec = changed(read_recipe("multi30k"), Changes(data=str(tmp_path)))
    assert (spec.data.path, spec.data.tokenizer, spec.data.languages) == (str(tmp_path), "byte_pairs:4000", "en-de")
    other = changed(read_recipe("multi30k"), Changes(data=str(tmp_path), tokenizer="word", languages="de-en"))
    assert (other.data.tokenizer, other.data.languages) == ("word", "de-en")


def test_a_file_of_ones_own_is_a_recipe(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nwidth = 8\n[data]\npath = "/x"\n')
    assert read_recipe(str(file)).model.width == 8


def test_the_command_line_changes_data_steps_seed_and_precision(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("a\tb\n")
    spec = changed(read_recipe("luong"), Changes(data=str(file), tokenizer="word", optimizer={"steps": 7}, seed=4))
    assert (spec.data.path, spec.data.tokenizer, spec.optimizer.steps, spec.seed) == (str(file), "word", 7, 4)
    assert changed(read_recipe("luong"), Changes(precision="bfloat16")).precision == "bfloat16"
    same = changed(read_recipe("luong"), Changes())
    assert same == read_recipe("luong")


def test_what_is_no_recipe_is_named(tmp_path):
    with pytest.raises(UnknownName, match="rnnsearch"):
        read_recipe("rnnserach")
    for content, said in (("[model\n", "TOML"), ("[model]\nwdith = 3\n", "wdith"), ("[model]\nwidth = 'x'\n", "width")):
        file = tmp_path / "bad.toml"
        file.write_text(content)
        with pytest.raises(InvalidValue, match=said):
            read_recipe(str(file))


def test_null_leaves_an_option_out(tmp_path):
    assert read_recipe("gemma2").model.family_options["pattern"][0]["options"]["norm_eps"] is None
    file = tmp_path / "mine.toml"
    file.write_text('[model.family_options]\npattern = [{ mechanism = "x", options = { rotary = "null" } }]\n')
    assert read_recipe(str(file)).model.family_options["pattern"][0]["options"]["rotary"] is None


def test_the_command_line_changes_the_attention_of_any_recipe():
    decoder = changed(read_recipe("gemma2"), Changes(attention="linear", options=["feature_map=relu"])).model
    assert (decoder.mechanism.name, dict(decoder.mechanism.options)) == ("linear", {"feature_map": "relu"})
    assert "pattern" not in decoder.family_options
    encoder = changed(read_recipe("longformer"), Changes(attention="bigbird", options=["block=4"])).model
    assert encoder.family_options["mechanism"] == "bigbird"
    assert dict(encoder.family_options["options"]) == {"block": 4}
    wider = changed(read_recipe("longformer"), Changes(options=["window=4"], fields=["width=64"])).model
    assert wider.family_options["options"]["window"] == 4
    assert (wider.family_options["mechanism"], wider.family_options["width"]) == ("longformer", 64)


def test_fewer_steps_warm_up_no_longer_than_they_last():
    optimizer = changed(read_recipe("bert"), Changes(optimizer={"steps": 20})).optimizer
    assert (optimizer.steps, optimizer.warmup_steps) == (20, 20)


def test_a_recipe_for_files_keeps_what_it_says_of_them(tmp_path):
    (tmp_path / "own.npz").touch()
    data = changed(read_recipe("vit-mnist"), Changes(data=str(tmp_path / "own.npz"))).data
    assert (data.path, data.validation_fraction) == (str(tmp_path / "own.npz"), 0.2)
