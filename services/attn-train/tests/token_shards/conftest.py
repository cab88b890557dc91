"""What the tests of prepared data share: a tokenizer, rows that can be told apart, and how they are prepared."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_schema.prepared import PrepareConfig
from attn_train.data.token_shards.pools import inline
from attn_train.data.token_shards.prepare import Request, prepare

WORDS = ["query", "key", "value", "softmax", "head", "über", "日本", "norm", "rotary", "'quoted'", "mask"]


def made_sentences(count: int, seed: int = 0) -> list[str]:
    choose = random.Random(seed)
    return [" ".join(choose.choices(WORDS, k=choose.randint(1, 30))) + f" {number}." for number in range(count)]


@pytest.fixture(scope="session")
def sentences():
    """Makes so many sentences, no two of them equal."""
    return made_sentences


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in byte_pair_tokenizer(made_sentences(200), 400).files().items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


@pytest.fixture
def prepared(tokenizer_folder):
    """Prepare files in this process; keywords are those of `PrepareConfig`."""

    def make(
        data, out, *, unit_bytes=1500, pool=inline, workers=1, validation=None, progress=lambda *_: None, **options
    ):
        options.setdefault("tokenizer", str(tokenizer_folder))
        request = Request([str(path) for path in data], PrepareConfig(**options), validation or {}, unit_bytes=1500)
        return prepare(request, out, workers=workers, pool=pool, progress=progress)

    return make


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in made_sentences(150)), encoding="utf-8"
    )
    return path
