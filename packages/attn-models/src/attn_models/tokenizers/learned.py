"""Tokenizers learned from a text, with tokens that begin and end it."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from attn_core.errors import InvalidValue
from tokenizers import decoders, models, pre_tokenizers, trainers

from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.tokenizers.tokenizer import Tokenizer

PAD, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = [PAD, BEGIN, END, UNKNOWN]
SETTINGS = TokenizerSettings(bos_token=BEGIN, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
BYTES = 256


def byte_pair_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level pairs merged up to `vocabulary` tokens (Sennrich et al. 2016, arXiv 1508.07909): it spells any text.

    Raises `InvalidValue` for a vocabulary that has no room for the bytes.
    """
    if vocabulary < BYTES + len(SPECIAL):
        raise InvalidValue.of("vocabulary", vocabulary, f"at least {BYTES + len(SPECIAL)}, for every byte")
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
    """One token for each word between spaces in the texts; other words become `<unk>`."""
    words = sorted({word for text in texts for word in text.split()} - set(SPECIAL))
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(SPECIAL + words)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Sequence([decoders.Replace(tokenizers.Regex("^"), " "), decoders.Fuse()])
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, SETTINGS)
