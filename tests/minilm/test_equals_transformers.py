"""all-MiniLM-L6-v2, fetched, gives the vectors that transformers' BertModel gives on the same weights."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Unavailable
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.sources import pull

pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [
    "A cat sat on the mat.",
    "A kitten rested on the rug.",
    "The tax return is due in May.",
    "café naïve 你好",
    "How far away is the moon? " * 20,
]


@pytest.fixture(scope="module")
def minilm():
    try:
        return load_sentence_encoder(pull("minilm"))
    except Unavailable as error:
        pytest.skip(f"MiniLM is neither here nor can it be fetched: {error}")


def test_vectors_are_those_of_transformers(minilm):
    transformers = pytest.importorskip("transformers")
    folder = pull("minilm")
    peer = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")
    given = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        rows = peer(**given).last_hidden_state
    keep = given["attention_mask"][..., None]
    mean = (rows * keep).sum(1) / keep.sum(1)
    expected = mean / mean.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(minilm.embed(TEXTS), expected, rtol=0, atol=1e-5)


def test_near_meanings_have_near_vectors(minilm):
    cat, kitten, tax, *_ = minilm.embed(TEXTS)
    assert cat @ kitten > 0.5 > 0.2 > cat @ tax
