"""Tokenizers learned from a text."""

from __future__ import annotations

import pytest
from attn_core.errors import InvalidValue, UserError
from attn_models.tokenizers import character_tokenizer
from attn_models.tokenizers.learned import byte_pair_tokenizer, word_tokenizer
from attn_models.tokenizers.tokenizer import decoder_start_ids, encoder_input_ids

TEXTS = ["Ein Hund läuft über die Straße.", "Two dogs run over the street."]


def test_byte_pairs_spell_any_text_and_merge_what_is_frequent():
    tokenizer = byte_pair_tokenizer(TEXTS * 5, 320)
    for text in (*TEXTS, "中文 \n\t ∑", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2
    assert tokenizer.vocab_size <= 320


def test_byte_pairs_are_the_same_each_time():
    one, other = (byte_pair_tokenizer(TEXTS * 5, 320).files()["tokenizer.json"] for _ in range(2))
    assert one == other


def test_words_are_tokens_and_others_are_unknown():
    tokenizer = word_tokenizer(["b a", "a c"])
    assert [tokenizer.token(i) for i in tokenizer.encode("a c zebra b")] == ["a", "c", "<unk>", "b"]
    assert tokenizer.decode(tokenizer.encode("a c b")).split() == ["a", "c", "b"]


def test_a_source_ends_and_a_target_begins():
    tokenizer = word_tokenizer(["a b"])
    spelled = [tokenizer.token(i) for i in encoder_input_ids(tokenizer, "b a")]
    assert spelled == ["b", "a", "</s>"]
    assert [tokenizer.token(i) for i in decoder_start_ids(tokenizer, tokenizer.encode("b"))] == ["<s>", "b"]


def test_what_cannot_be_is_named():
    with pytest.raises(InvalidValue, match="at least 260"):
        byte_pair_tokenizer(TEXTS, 200)
    with pytest.raises(InvalidValue, match="at least one token"):
        encoder_input_ids(word_tokenizer(["a"]), "  ")
    with pytest.raises(UserError, match="start token"):
        decoder_start_ids(character_tokenizer("ab"))
    with pytest.raises(UserError, match="end"):
        encoder_input_ids(character_tokenizer("ab"), "a")
