"""Texts of byte-level tokens that are joined here equal the library's, whatever the ids."""

from __future__ import annotations

import pytest
import tokenizers
from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.tokenizers.vocabulary import ByteDecoder, byte_of_character
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

SPECIAL, ADDED = ["<end>", "<é>"], ["Ġword", "日本", "a b", "é~"]
SIZE = 256 + len(SPECIAL) + len(ADDED)


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """A token for each byte, special ones, and added ones in the alphabet and out of it."""
    found = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_of_character())}, merges=[]))
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    found.add_tokens([AddedToken(token, special=False) for token in ADDED])
    assert found.get_vocab_size() == SIZE
    return found


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=24))
def test_any_ids_have_the_text_that_the_library_decodes(backend, ids):
    """Bytes that are no UTF-8 and cut characters too."""
    texts = ByteDecoder.of(backend, {256, 257})
    assert texts is not None
    assert texts.text(ids) == backend.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 3))
def test_texts_cut_anywhere_have_the_text_that_the_library_decodes(backend, text, cut):
    alphabet = {byte: c for c, byte in byte_of_character().items()}
    ids = [backend.token_to_id(alphabet[b]) for b in text.encode("utf-8", "surrogatepass")][cut:]
    texts = ByteDecoder.of(backend, ())
    assert texts is not None
    assert texts.text(ids) == backend.decode(ids, skip_special_tokens=False)


def test_tokenizers_of_another_kind_are_left_to_the_library():
    assert ByteDecoder.of(character_tokenizer("abc").backend, ()) is None


@pytest.mark.parametrize("wrong", [SIZE, -1, 1 << 70])
def test_an_id_without_a_token_is_refused_with_its_place(backend, wrong):
    tokenizer = Tokenizer(backend, TokenizerSettings())
    assert tokenizer.decode([64, 256, 65]) == tokenizer.backend.decode([64, 256, 65])
    with pytest.raises(InvalidValue, match=r"token_ids\[2\]"):
        tokenizer.decode([64, 65, wrong])
