"""Two small real models in a home of their own: one writes, one can chat as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attn_engine import LocalClient
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig

ALPHABET = "abcdefghijklmnopqrstuvwxyz <>:?.ABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
CONTEXT = 128


def save_small(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(ALPHABET)
    model = Decoder(
        DecoderConfig(vocab_size=tokenizer.vocab_size, max_seq_len=CONTEXT, hidden_size=32, num_layers=2, num_heads=4)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # as drawn, every token is about as likely as every other
    save_model(folder, model, tokenizer)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the models "writer" and "talker"."""
    folder = tmp_path_factory.mktemp("home")
    save_small(folder / "models" / "writer", seed=1)
    talker = folder / "models" / "talker"
    save_small(talker, seed=2)
    (talker / "manifest.json").unlink()  # it would not list the template
    (talker / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def client(home: Path):
    with LocalClient(home) as opened:
        yield opened
