"""`attn convert heads` and `attn convert latent` as a user calls them."""

import json

import pytest
import torch
from attn_core.errors import UnknownName
from attn_models import commands
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer
from typer.testing import CliRunner

TEXT = "to be or not to be"


@pytest.fixture
def attn():
    return lambda *words: CliRunner().invoke(commands.app, [str(word) for word in words])


@pytest.fixture
def folder(tiny, tmp_path):
    tokenizer = character_tokenizer(TEXT)
    model = Decoder(tiny(vocab_size=tokenizer.vocab_size, positions="rotary", norm="rms", feed_forward="swiglu"))
    return save_model(tmp_path / "before", model, tokenizer, layout="llama")


def test_heads_answers_with_the_energy_kept_and_the_losses_on_a_text(attn, folder, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    result = attn("heads", folder, tmp_path / "after", "--num-kv-heads", 2, "--text", tmp_path / "text", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["layout"] == "llama"
    assert 0 < said["energy"] < 1
    assert said["loss_after"] != said["loss_before"] > 0
    assert load_model(tmp_path / "after").config.num_kv_heads == 2


def test_heads_takes_an_explicit_map(attn, folder, tmp_path):
    assert attn("heads", folder, tmp_path / "after", "--groups", "0,1,1,1").exit_code == 0
    assert load_model(tmp_path / "after").config.options == {"groups": [0, 1, 1, 1]}


@pytest.mark.parametrize(
    "words",
    [(), ("--num-kv-heads", 2, "--groups", "0,0,1,1"), ("--groups", "a"), ("--num-kv-heads", 2, "--method", "median")],
)
def test_heads_refuses_what_it_cannot_do(attn, folder, tmp_path, words):
    assert attn("heads", folder, tmp_path / "after", *words).exit_code != 0
    assert not (tmp_path / "after").exists()


def test_a_model_of_this_machine_is_found_by_its_name(attn, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    folder.rename(tmp_path / "home" / "models" / "mine")
    assert attn("heads", "mine", tmp_path / "after", "--num-kv-heads", 2).exit_code == 0
    assert load_model(tmp_path / "after").config.num_kv_heads == 2
    refused = attn("heads", "mime", tmp_path / "other", "--num-kv-heads", 2)
    assert isinstance(refused.exception, UnknownName)
    assert "mine" in str(refused.exception)


def test_how_far_the_losses_are_is_told(attn, folder, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    said = attn("latent", folder, tmp_path / "after", "--text", tmp_path / "text").stderr
    assert f"loss before: 100 % of {len(TEXT) - 1} tokens" in said
    assert f"loss after: 100 % of {len(TEXT) - 1} tokens" in said


def test_latent_at_full_rank_changes_nothing(attn, folder, tmp_path):
    result = attn("latent", folder, tmp_path / "after")
    assert result.exit_code == 0, result.output
    assert "energy kept 1.0000" in result.stdout
    tokens = torch.randint(5, (1, 8))
    before, after = (load_model(path).model for path in (folder, tmp_path / "after"))
    assert torch.allclose(before(tokens), after(tokens), rtol=0, atol=1e-5)


def test_a_file_for_a_text_that_is_not_there_is_named(attn, folder, tmp_path):
    result = attn("latent", folder, tmp_path / "after", "--text", tmp_path / "none")
    assert "none" in str(result.exception)


def test_without_a_subcommand_a_folder_is_converted_as_it_is(attn, folder, tmp_path):
    result = attn("--dtype", "float32", folder, tmp_path / "after", "--json")
    assert json.loads(result.stdout) == {"folder": str(tmp_path / "after")}
    assert load_model(tmp_path / "after").config.num_kv_heads == 4
