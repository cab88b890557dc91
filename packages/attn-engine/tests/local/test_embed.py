"""`attn embed` with an encoder of this machine."""

from __future__ import annotations

import json

import pytest
import torch
from attn_cli.main import load
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_models.adapters.bert import BertAdapter
from attn_models.adapters.state_dict import stored_tensors
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.tokenizers import character_tokenizer
from attn_models.weights import write_folder
from click.testing import CliRunner

CONFIG = {
    "model_type": "bert",
    "vocab_size": 5,
    "max_position_embeddings": 12,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = Encoder(
        EncoderConfig(vocab_size=5, max_seq_len=12, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8)
    )
    tensors = stored_tensors(model.state_dict(), BertAdapter())
    return write_folder(tmp_path / "bert", CONFIG, tensors, character_tokenizer("abcd ").files())


def embed(*words, text=""):
    command = load(installed().commands.get("embed"))
    return CliRunner().invoke(command, words, input=text, catch_exceptions=False)


def test_json_gives_the_vectors(folder):
    done = embed("--model", str(folder), "--json", "abc", "-", text="d\n\nab\n")
    lines = json.loads(done.stdout)
    assert [line["text"] for line in lines] == ["abc", "d", "ab"]
    expected = load_sentence_encoder(folder).embed(["abc", "d", "ab"])
    torch.testing.assert_close(torch.tensor([line["embedding"] for line in lines]), expected)


def test_people_see_how_near_texts_are(folder):
    one, two = load_sentence_encoder(folder).embed(["abc", "dd"])
    done = embed("--model", str(folder), "abc", "dd")
    assert done.stdout.splitlines()[1].split() == ["2", f"{float(one @ two):.3f}", "1.000", "dd"]


def test_nothing_to_embed_is_refused(folder):
    with pytest.raises(InvalidValue, match="not empty"):
        embed("--model", str(folder), "-", text="\n")
