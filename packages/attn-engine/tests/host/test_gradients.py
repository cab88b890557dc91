"""Gradients by the prompt's tokens are those of torch's autograd, or the reason why there are none is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attn_engine.host.gradients import MAX_TOKENS, input_gradients
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig

IDS = [0, 3, 1, 2, 2, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random decoder."""
    torch.manual_seed(7)
    tokenizer = character_tokenizer("abcdefgh")
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, max_seq_len=96, hidden_size=32, num_layers=2, num_heads=4, mechanism="gqa"
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    save_model(path, model, tokenizer)
    return path


def loaded(folder: Path, quantization: str) -> Any:
    return load_model(folder, "float32", device="cpu", quantization=quantization)


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_gradients_are_those_of_autograd_packed_weights_or_not(folder: Path, quantization: str) -> None:
    found = input_gradients(loaded(folder, quantization), IDS)
    model = loaded(folder, "none").model
    rows = model.embedding(torch.tensor(IDS)[None]).detach().requires_grad_()
    handle = model.embedding.register_forward_hook(lambda *_: rows)
    logits = torch.log_softmax(model(torch.tensor([IDS]))[0, -1], -1)
    handle.remove()
    assert found.target == int(logits.argmax())
    (gradient,) = torch.autograd.grad(logits.max(), rows)
    expected = (gradient * rows)[0].sum(-1).tolist()
    assert found.note == ""
    assert found.contributions == pytest.approx(expected, rel=0.01, abs=2e-4)


def test_long_prompts_have_a_note_and_no_gradients(folder: Path) -> None:
    found = input_gradients(loaded(folder, "none"), [1] * (MAX_TOKENS + 1))
    assert found.contributions == ()
    assert f"at most {MAX_TOKENS}" in found.note


def test_a_model_that_rounds_is_told_apart(folder: Path) -> None:
    coarse = loaded(folder, "none")
    # As weights in few bits do: what goes into the last norm comes in steps far wider than the change of an embedding.
    coarse.model.norm.register_forward_pre_hook(lambda _module, args: ((args[0] * 4).round() / 4,))
    found = input_gradients(coarse, IDS)
    assert found.contributions == ()
    assert "precision is too low" in found.note
