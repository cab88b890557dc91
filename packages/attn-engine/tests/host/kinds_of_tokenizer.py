"""Small tokenizers of every kind that published models have, made as theirs are."""

from __future__ import annotations

import string
from collections.abc import Callable

import tokenizers
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

BLANK = "\u2581"
CORPUS = ['the cat sat on the mat, and the dog said: yes, 12 euros {"name": "Ann", "age": 7}'] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = [BLANK, *string.ascii_letters, *string.digits, *' {}[]":,.-\u00e9'[1:]]
WORDS = ["the", "cat", f"{BLANK}the", f"{BLANK}cat", "yes", f"{BLANK}yes", "na", "name", "ag", "age", "12"]


def begins_with_bos(backend: tokenizers.Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )


def byte_level(*, bos: bool = False, added: bool = False) -> tokenizers.Tokenizer:
    """As of Qwen 3; with a beginning token as of Llama 3.1; with added tokens that are text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if added:
        backend.add_tokens([AddedToken("  "), AddedToken("<think>"), AddedToken("\u00e9t\u00e9")])
    if bos:
        begins_with_bos(backend)
    return backend


def byte_fallback(*, prefix: bool) -> tokenizers.Tokenizer:
    """As of Llama 2 and Mistral, which put a blank in front; without it as of Gemma."""
    pieces = ["<unk>", "<s>", "</s>", *BYTES, *CHARACTERS]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for start in range(1, len(word)):
            left, right = word[:start], word[start]
            if word[: start + 1] not in pieces:
                pieces.append(word[: start + 1])
                merges.append((left, right))
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    blanks = normalizers.Replace(" ", BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks]) if prefix else blanks
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if not prefix:
        backend.add_tokens([AddedToken(BLANK * 2, normalized=False)])  # as Gemma 3 has them
    begins_with_bos(backend)
    return backend


def byte_level_within_a_sequence() -> tokenizers.Tokenizer:
    """Like `byte_level`, with its decoder as a part of others."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def unigram(*, fallback: bool) -> tokenizers.Tokenizer:
    """As of T5 and ALBERT (Metaspace); with byte fallback as SentencePiece writes it."""
    pieces = ["<unk>", "<s>", "</s>", *(BYTES if fallback else []), *CHARACTERS, *WORDS]
    scored = [(piece, -1.0 - 0.01 * place) for place, piece in enumerate(dict.fromkeys(pieces))]
    backend = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]) if fallback else None
    backend.decoder = backend.decoder or decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """As of BERT, whose text is not the bytes of its tokens."""
    pieces = ["[UNK]", "<s>", "</s>", *string.ascii_lowercase, *(f"##{one}" for one in string.ascii_lowercase)]
    pieces += [*"{}:,.'!", "the", "cat", "##s", "n", "do"]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "<s>", "</s>"])
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, beginning token": lambda: byte_level(bos=True),
    "byte-level, added tokens": lambda: byte_level(added=True),
    "byte-level within a sequence": byte_level_within_a_sequence,
    "byte fallback, prefix blank": lambda: byte_fallback(prefix=True),
    "byte fallback, no prefix": lambda: byte_fallback(prefix=False),
    "unigram": lambda: unigram(fallback=False),
    "unigram, byte fallback": lambda: unigram(fallback=True),
    "word pieces": word_piece,
}


def tokenizer_of(kind: str) -> Tokenizer:
    """The tokenizer of a kind, which ends with </s>."""
    return Tokenizer(KINDS[kind](), TokenizerSettings(bos_token="<s>", eos_token="</s>"))
