"""`attn transcribe` with a model that runs here: the likeliest words of an audio, and audio that is refused."""

from __future__ import annotations

import json
import wave

import pytest
import torch
from attn_cli.main import load
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_models.encoder_decoder.config import WhisperConfig
from attn_models.encoder_decoder.whisper import Whisper
from attn_models.loading import load_model, save_model
from attn_models.loading.audio import LogMel, read_wav
from attn_models.tokenizers.learned import word_tokenizer
from click.testing import CliRunner

TOKENIZER = word_tokenizer(["one two three four five six seven eight nine ten eleven twelve"])
BEGIN = (3, TOKENIZER.vocab_size - 1)
"""The token that begins a text, and the one that asks for no timestamps, the last one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = WhisperConfig(
        vocab_size=TOKENIZER.vocab_size,
        max_seq_len=12,
        max_encoder_len=50,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=24,
        num_mel_bins=20,
    )
    torch.manual_seed(3)
    model = Whisper(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    said = {"decoder_start_token_id": BEGIN[0], "no_timestamps_token_id": BEGIN[1], "suppress_tokens": [7]}
    place = tmp_path_factory.mktemp("whisper")
    return save_model(place / "w", model, TOKENIZER, generation=said | {"is_multilingual": False})


def talk(path, seconds, rate=16000):
    torch.manual_seed(int(10 * seconds))
    samples = (torch.randn(int(seconds * rate)) * 5000).to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.numpy().tobytes())
    return str(path)


def transcribe(*words):
    command = load(installed().commands.get("transcribe"))
    return CliRunner().invoke(command, words, catch_exceptions=False).stdout


@torch.no_grad()
def by_hand(folder, samples):
    """The words after each other, the whole sequence computed again for each."""
    loaded = load_model(folder)
    ids, frames = list(BEGIN), LogMel(20, 100)(samples)[None]
    while len(ids) < 12 and ids[-1] not in loaded.tokenizer.end_ids:
        logits = loaded.model(torch.tensor([ids]), frames)[0, -1]
        logits[7] = -torch.inf
        ids.append(int(logits.argmax()))
    return loaded.tokenizer.decode([token for token in ids[2:] if token < BEGIN[1]])


def test_words_are_the_likeliest_one_after_the_other(folder, tmp_path):
    path = talk(tmp_path / "talk.wav", 0.7)
    expected = by_hand(folder, read_wav(path)).strip()
    assert expected
    assert transcribe("--model", str(folder), path).strip() == expected
    assert json.loads(transcribe("--model", str(folder), "--json", path)) == {"file": path, "text": expected}


def test_what_is_longer_than_the_model_hears_is_heard_in_stretches(folder, tmp_path):
    path = talk(tmp_path / "long.wav", 1.5)
    stretches = torch.split(read_wav(path), 16000)
    expected = [by_hand(folder, stretch).strip() for stretch in stretches]
    assert transcribe("--model", str(folder), path).strip() == " ".join(expected)


@pytest.mark.parametrize(
    ("words", "said"), [(("--language", "xx"), "language"), (("--task", "translate"), "task"), ((), "44100")]
)
def test_what_is_not_heard_is_refused(folder, words, said, tmp_path):
    path = talk(tmp_path / "talk.wav", 0.2, 16000 if words else 44100)
    with pytest.raises(InvalidValue, match=said):
        transcribe("--model", str(folder), *words, path)
