"""Tokenizers from the vocabularies in GGUF files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import tokenizers
from attn_core.errors import CheckpointInvalid, UnknownName
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from attn_models.tokenizers.applied import set_ends
from attn_models.tokenizers.learned import character_backend
from attn_models.tokenizers.pre_tokenizers import longest_match_backend, pre_tokenizer_named
from attn_models.tokenizers.sentencepiece import Piece, pieces_backend
from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.tokenizers.tokenizer import Tokenizer
from attn_models.tokenizers.vocabulary import BLANK, LibraryErrors
from attn_models.weights.gguf_reader import GgufHeader

NORMAL_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN, BYTE_TOKEN = 1, 2, 3, 4, 6
"""Values of tokenizer.ggml.token_type."""
SPECIAL = {CONTROL_TOKEN: True, UNKNOWN_TOKEN: True, USER_DEFINED_TOKEN: False}
"""Whether tokens that texts are searched for first are left out of decoded texts, by type."""
BYTES = 256
PRE = "tokenizer.ggml.pre"
CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
SEPARATOR = "seperator"  # codespell:ignore -- the spelling of the key in files
USUAL_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"bos": 101, SEPARATOR: 102, "unknown": 100, "padding": 0, "mask": 103},
}
"""The ids of special tokens in files that do not name them, by tokenizer.ggml.model, as in llama.cpp."""


def _pieces_backend(header: GgufHeader, tokens: tuple[str, ...], *, unigram: bool = False) -> tokenizers.Tokenizer:
    """SentencePiece's BPE, or its unigram model; without a flag, texts of both get a blank in front.

    Raises `CheckpointInvalid` for scores or types that do not fit the tokens, and if byte tokens are missing.
    """
    scores, types = header.metadata.get("tokenizer.ggml.scores"), header.integers("tokenizer.ggml.token_type")
    if not isinstance(scores, tuple) or len(scores) != len(tokens) or len(types) != len(tokens):
        raise CheckpointInvalid.of(header.path, "the vocabulary does not have a score and a type for each token")
    if types.count(BYTE_TOKEN) not in ((BYTES, 0) if unigram else (BYTES,)):
        raise CheckpointInvalid.of(header.path, f"{types.count(BYTE_TOKEN)} byte tokens; needed: {BYTES}")
    unknown = _named(header, tokens, "unknown")
    kinds = [UNKNOWN_TOKEN if token == unknown else kind for token, kind in zip(tokens, types, strict=True)]
    charsmap = header.integers(CHARSMAP) if CHARSMAP in header.metadata else ()
    if not all(-128 <= number < BYTES for number in charsmap):  # some files have signed bytes
        raise CheckpointInvalid.of(header.path, f"{CHARSMAP} does not consist of bytes")
    return pieces_backend(
        [Piece(*piece) for piece in zip(tokens, scores, kinds, strict=True)],
        unigram=unigram,
        charsmap=bytes(number % BYTES for number in charsmap),
        strips=header.flag("tokenizer.ggml.remove_extra_whitespaces", default=unigram),
        prefixed=header.flag("tokenizer.ggml.add_space_prefix", default=True),
    )


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer | None:
    """The tokenizer of the file: byte-level BPE ("gpt2"), BPE of characters ("gemma4"), SentencePiece's BPE ("llama")
    or unigram model ("t5"), WordPiece ("bert"), or RWKV's longest match ("rwkv"); None if it has none ("none").

    Raises `UnknownName` for an unsupported tokenizer model or pre-tokenizer, and `CheckpointInvalid` for an
    inconsistent vocabulary.
    """
    kind = header.text("tokenizer.ggml.model")
    if kind == "none":
        return None
    if kind not in BACKENDS:
        raise UnknownName.of("GGUF tokenizer model", kind, [*BACKENDS, "none"])
    tokens = header.texts("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointInvalid.of(header.path, "a token of the vocabulary is given twice")
    with LibraryErrors(lambda said: CheckpointInvalid.of(header.path, f"the vocabulary is inconsistent: {said}")):
        backend = BACKENDS[kind](header, tokens)
    if kind == "bert":
        tokens = word_pieces(tokens, header.integers("tokenizer.ggml.token_type"))
    _add_special_tokens(backend, header, tokens)
    _add_ends(backend, header, tokens, kind)
    return Tokenizer(backend, _settings(header, tokens))


def _byte_level_backend(header: GgufHeader, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(_merged_model(header, tokens))
    pre_tokenizer_named(header.text(PRE)).apply(backend)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merged_characters_backend(header: GgufHeader, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    """Gemma 4's BPE of characters, with marks for blanks and bytes for what has no token."""
    if (count := header.integers("tokenizer.ggml.token_type").count(BYTE_TOKEN)) != BYTES:
        raise CheckpointInvalid.of(header.path, f"{count} byte tokens; needed: {BYTES}")
    unknown = _named(header, tokens, "unknown")
    model = _merged_model(header, tokens, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", BLANK)
    backend.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


STRIP_ACCENTS = "tokenizer.ggml.normalizer.strip_accents"


def _word_piece_backend(header: GgufHeader, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    """BERT's WordPiece, whose pieces at the beginning of a word have a blank before them in the file, and no others.

    Where the file does not say whether texts are read in lower case, they are if the vocabulary has no capitals, as in
    BERT's published ones; otherwise they keep case and accents.
    """
    types = header.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointInvalid.of(header.path, f"{len(types)} token types for {len(tokens)} tokens")
    spelled = word_pieces(tokens, types)
    words = [word for word, kind in zip(spelled, types, strict=True) if kind != CONTROL_TOKEN and word[:1] != "["]
    model = models.WordPiece(
        vocab={word: place for place, word in enumerate(spelled)},
        unk_token=_named(header, tokens, "unknown") or "[UNK]",
    )
    backend = tokenizers.Tokenizer(model)
    lowercase = header.flag("tokenizer.ggml.normalizer.lowercase", default=all(word == word.lower() for word in words))
    strips = header.flag(STRIP_ACCENTS, default=False) if STRIP_ACCENTS in header.metadata else None
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def word_pieces(tokens: Iterable[str], types: Iterable[int]) -> tuple[str, ...]:
    """The pieces as BERT's vocabulary spells them. Older converters leave all tokens in brackets as they are."""
    return tuple(
        token
        if kind == CONTROL_TOKEN or (token[:1] == "[" and token[-1:] == "]")
        else token.removeprefix(BLANK)
        if token.startswith(BLANK)
        else f"##{token}"
        for token, kind in zip(tokens, types, strict=True)
    )


ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\(.)|(.)", re.DOTALL)
SHORT = {"n": "\n", "r": "\r", "t": "\t"}


def rwkv_bytes(token: str) -> bytes:
    """The bytes of a token as RWKV's files spell them: Python's escapes, without quotes."""
    found = ESCAPE.findall(token)
    return b"".join(bytes.fromhex(h) if h else (SHORT.get(short, short) or plain).encode() for h, short, plain in found)


def _longest_match_backend(header: GgufHeader, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    """RWKV's longest match over the bytes of a text, or a vocabulary of single characters, as `attn models export`
    writes it."""
    types = header.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointInvalid.of(header.path, f"{len(types)} token types for {len(tokens)} tokens")
    spelled = {
        rwkv_bytes(token): place
        for place, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == NORMAL_TOKEN
    }
    characters = [token.decode(errors="replace") for token in spelled]
    if len(spelled) == len(tokens) and all(len(character) == 1 for character in characters):
        return character_backend(characters)
    if sum(len(token) == 1 for token in spelled) != BYTES:
        raise CheckpointInvalid.of(header.path, "an RWKV vocabulary without a token for each byte")
    named = {token: place for place, token in enumerate(tokens) if types[place] in SPECIAL}
    return longest_match_backend(spelled, named)


BACKENDS: dict[str, Callable[[GgufHeader, tuple[str, ...]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_backend,
    "gemma4": _merged_characters_backend,
    "llama": _pieces_backend,
    "t5": partial(_pieces_backend, unigram=True),
    "rwkv": _longest_match_backend,
    "bert": _word_piece_backend,
}
"""The functions that build a tokenizer, by tokenizer.ggml.model."""


def _merged_model(header: GgufHeader, tokens: tuple[str, ...], **options: Any) -> models.BPE:
    merges = []
    for merge in header.texts("tokenizer.ggml.merges"):
        first, space, second = merge.partition(" ")
        if not (first and space and second) or " " in second:
            raise CheckpointInvalid.of(header.path, f"the merge {merge[:60]!r} is not two tokens")
        merges.append((first, second))
    vocabulary = {token: place for place, token in enumerate(tokens)}
    return models.BPE(vocab=vocabulary, merges=merges, **options)


def _add_special_tokens(backend: tokenizers.Tokenizer, header: GgufHeader, tokens: tuple[str, ...]) -> None:
    types = header.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointInvalid.of(header.path, f"{len(types)} token types for {len(tokens)} tokens")
    added = [
        AddedToken(token, normalized=False, special=SPECIAL[kind])
        for token, kind in zip(tokens, types, strict=True)
        if kind in SPECIAL
    ]
    backend.add_tokens(added)


def _add_ends(backend: tokenizers.Tokenizer, header: GgufHeader, tokens: tuple[str, ...], kind: str) -> None:
    """Add the tokens with which every text begins and ends."""
    if kind == "bert":
        set_ends(backend, _named(header, tokens, _first(header)), _named(header, tokens, SEPARATOR))
        return
    begins = kind in ("llama", "gemma4") or (kind == "gpt2" and pre_tokenizer_named(header.text(PRE)).begins)
    wanted = {"bos": begins, "eos": kind == "t5"}
    found = {
        word: _named(header, tokens, word) if header.flag(f"tokenizer.ggml.add_{word}_token", default=usual) else None
        for word, usual in wanted.items()
    }
    if any(token is not None for token in found.values()):
        set_ends(backend, found["bos"], found["eos"])


def _first(header: GgufHeader) -> str:
    """The word in the key of BERT's first token: today's converters write it as that of the beginning."""
    return "cls" if "tokenizer.ggml.cls_token_id" in header.metadata else "bos"


def _settings(header: GgufHeader, tokens: tuple[str, ...]) -> TokenizerSettings:
    template = header.metadata.get("tokenizer.chat_template")
    return TokenizerSettings(
        bos_token=_named(header, tokens, "bos"),
        eos_token=_named(header, tokens, "eos"),
        pad_token=_named(header, tokens, "padding"),
        unk_token=_named(header, tokens, "unknown"),
        cls_token=_named(header, tokens, _first(header) if header.text("tokenizer.ggml.model") == "bert" else "cls"),
        sep_token=_named(header, tokens, SEPARATOR),
        mask_token=_named(header, tokens, "mask"),
        chat_template=template if isinstance(template, str) else None,
    )


def _named(header: GgufHeader, tokens: tuple[str, ...], word: str) -> str | None:
    key = f"tokenizer.ggml.{word}_token_id"
    usual = USUAL_IDS.get(header.text("tokenizer.ggml.model"), {}).get(word, len(tokens))
    token_id = header.metadata.get(key, usual if usual < len(tokens) else None)
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise CheckpointInvalid.of(header.path, f"{key} is {token_id!r}; the vocabulary has {len(tokens)} tokens")
    return tokens[token_id]
