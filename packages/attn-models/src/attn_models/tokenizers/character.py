"""Tokenizers with one token for each character."""

from __future__ import annotations

import tokenizers
from attn_core.errors import InvalidValue
from tokenizers import Regex, decoders, models, pre_tokenizers

from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.tokenizers.tokenizer import Tokenizer

_NO_CHARACTER = "<no such character>"


def character_tokenizer(text: str) -> Tokenizer:
    """A tokenizer whose vocabulary is the sorted set of characters (code points) in `text`.

    It is saved as a tokenizer.json like any other. It has no special tokens: encoding a character
    that is not in `text` raises InvalidValue.

    Raises InvalidValue for an empty text.
    """
    if not text:
        raise InvalidValue.of("text", "", "at least one character")
    vocabulary = {character: place for place, character in enumerate(sorted(set(text)))}
    # The library wants a name for unknown tokens; one that no text can produce makes it refuse instead.
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=_NO_CHARACTER))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, TokenizerSettings())
