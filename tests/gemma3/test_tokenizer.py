"""Gemma's tokenizer, made from the vocabulary of its GGUF file, cuts text as sentencepiece does."""

from __future__ import annotations

import pytest
from attn_models.tokenizers.vocabulary import BLANK

pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [
    "The capital of France is Paris. It's 100 years old, isn't it?",
    " leading blank and trailing blank ",
    "café naïve Ångström façade œuvre",
    "你好，世界。日本語とハングル 한국어",
    "😀👍🏽 👩‍👩‍👧 flags 🇫🇷",
    "In 2024, 3.14159 and 1,000,000 cost $12",
    "def f(x):\n    return {'a': x ** 2}\n\n\n\tend",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft",
    "a\u0378b\U000e0001c",
]


@pytest.fixture(scope="module")
def processor(gemma3):
    """sentencepiece itself, over a model of the same pieces, scores and types."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2 as proto

    tokenizer = gemma3.tokenizer
    merges = {first + second: None for first, second in _merges(tokenizer)}
    rank = {piece: -float(number) for number, piece in enumerate(merges)}
    model = proto.ModelProto()
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    added = tokenizer.backend.get_added_tokens_decoder()
    kinds = proto.ModelProto.SentencePiece
    for place in range(tokenizer.vocab_size):
        piece = tokenizer.token(place)
        kind = kinds.BYTE if piece.startswith("<0x") else kinds.NORMAL
        if place in added:
            kind = kinds.CONTROL if added[place].special else kinds.USER_DEFINED
            piece = piece.replace(" ", BLANK)
        kind = kinds.UNKNOWN if piece == "<unk>" else kind
        model.pieces.add(piece=piece, score=rank.get(piece, -1e6), type=kind)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def _merges(tokenizer):
    import json

    return json.loads(tokenizer.backend.to_str())["model"]["merges"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_cut_as_by_sentencepiece(gemma3, processor, text):
    ids = gemma3.tokenizer.encode(text, add_special=False)
    assert ids == processor.encode(text)
    assert gemma3.tokenizer.decode(ids) == text
