"""Tokenizers whose vocabulary is built from texts: characters, byte pairs and words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import tokenizers
from attn_core.errors import InvalidValue
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.tokenizers.tokenizer import Tokenizer

_NO_CHARACTER = "<no such character>"


def character_tokenizer(text: str) -> Tokenizer:
    """A tokenizer whose vocabulary is the sorted set of characters (code points) in `text`.

    It is saved as a tokenizer.json like any other. It has no special tokens: encoding a character
    that is not in `text` raises `InvalidValue`.

    Raises `InvalidValue` for an empty text.
    """
    if not text:
        raise InvalidValue.of("text", "", "at least one character")
    return Tokenizer(character_backend(sorted(set(text))), TokenizerSettings())


def character_backend(characters: Sequence[str]) -> tokenizers.Tokenizer:
    """A backend whose tokens are these characters, in this order."""
    vocabulary = {character: place for place, character in enumerate(characters)}
    # The library requires a name for the unknown token; with one that is not in the vocabulary it raises an error.
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=_NO_CHARACTER))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


PAD, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = [PAD, BEGIN, END, UNKNOWN]
SETTINGS = TokenizerSettings(bos_token=BEGIN, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
BYTES = 256


def byte_pair_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with up to `vocabulary` tokens, trained on `texts` (Sennrich et al. 2016, arXiv
    1508.07909); it can encode any text.

    Raises `InvalidValue` for a vocabulary smaller than all bytes and special tokens.
    """
    if vocabulary < BYTES + len(SPECIAL):
        raise InvalidValue.of("vocab_size", vocabulary, f"at least {BYTES + len(SPECIAL)}, for every byte")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, SETTINGS)


def word_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer with one token for each whitespace-separated word in the texts; other words become `<unk>`."""
    words = sorted({word for text in texts for word in text.split()} - set(SPECIAL))
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(SPECIAL + words)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Sequence([decoders.Replace(tokenizers.Regex("^"), " "), decoders.Fuse()])
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, SETTINGS)


MASK = "<mask>"


def with_mask(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer itself if it has a mask token, else a copy with `<mask>` added at the end of its vocabulary."""
    if tokenizer.mask_id is not None:
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens([MASK])
    return Tokenizer(backend, dataclasses.replace(tokenizer.settings, mask_token=MASK))
