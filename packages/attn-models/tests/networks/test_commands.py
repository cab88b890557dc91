"""`attn convert` and `attn pull` as a user calls them."""

from __future__ import annotations

import ast
import json

import pytest
import torch
import typer
from attn_core import installed
from attn_models import commands
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_testing.checkpoints import require_same_model
from typer.testing import CliRunner


@pytest.fixture
def attn():
    """Runs a subcommand by its name in the catalogue."""
    app = typer.Typer()
    targets = [installed().commands.get(name).target for name in ("convert", "pull")]
    assert targets == [f"{commands.__name__}:app", f"{commands.__name__}:pull"]
    app.add_typer(commands.app, name="convert")
    app.command("pull")(commands.pull)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_convert_writes_a_folder_that_loads_and_says_where(attn, tiny, tmp_path):
    model = Decoder(tiny()).eval()
    save_model(tmp_path / "before", model)
    result = attn("convert", tmp_path / "before", tmp_path / "after", "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"folder": str(tmp_path / "after")}
    tokens = torch.randint(31, (1, 8))
    require_same_model(load_model(tmp_path / "after").model, model, tokens)


def test_convert_refuses_a_type_that_it_cannot_write(attn, tmp_path):
    result = attn("convert", tmp_path / "before", tmp_path / "after", "--dtype", "int3")
    assert result.exit_code == 2
    assert "int3" in result.output


def test_convert_leaves_nothing_behind_when_it_refuses(attn, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(3))
    result = attn("convert", tmp_path / "model.gguf", tmp_path / "after")
    assert result.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_pull_without_a_name_says_what_there_is(attn):
    rows = json.loads(attn("pull", "--json").stdout)
    assert {"smollm2-135m-instruct", "shakespeare"} <= {row["name"] for row in rows}
    assert "smollm2-135m-instruct" in attn("pull").stdout


def test_pull_answers_an_unknown_name_with_the_nearest(attn):
    result = attn("pull", "smollm2")
    assert "smollm2-135m-instruct" in str(result.exception)


def test_pull_finds_what_was_fetched_before(attn, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_HOME", str(tmp_path))
    text = tmp_path / "texts" / "shakespeare.txt"
    text.parent.mkdir()
    text.write_text("To be")
    assert json.loads(attn("pull", "shakespeare", "--json").stdout)["path"] == str(text)


def test_tokenize_shows_the_pieces_that_the_text_is_made_of(tiny, tmp_path):
    text = "Hi how are you"
    tokenizer = byte_pair_tokenizer([text * 3], 265)
    save_model(tmp_path / "model", Decoder(tiny(vocab_size=tokenizer.vocab_size)), tokenizer=tokenizer)
    app = typer.Typer()
    app.command()(commands.tokenize)
    shown = CliRunner().invoke(app, [str(tmp_path / "model"), text, "--json"])
    rows = json.loads(shown.stdout)
    assert [row["token"] for row in rows] == tokenizer.encode(text)
    assert "".join(ast.literal_eval(row["piece"]) for row in rows) == text
    assert CliRunner().invoke(app, [str(tmp_path / "none"), text]).exit_code != 0
