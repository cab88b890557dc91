"""Tokenizers from the vocabularies in GGUF files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import tokenizers
from attn_core.errors import CheckpointInvalid, Incompatible, UnknownName
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from attn_models.tokenizers.applied import set_ends
from attn_models.tokenizers.learned import character_backend
from attn_models.tokenizers.pre_tokenizers import pre_tokenizer_named
from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.tokenizers.tokenizer import Tokenizer
from attn_models.tokenizers.vocabulary import BLANK, ranked_merges
from attn_models.weights.gguf_reader import GgufHeader

NORMAL_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN, BYTE_TOKEN = 1, 2, 3, 4, 6
"""Values of tokenizer.ggml.token_type."""
BYTES = 256
PRE = "tokenizer.ggml.pre"
SEPARATOR = "seperator"  # codespell:ignore -- the spelling of the key in files
USUAL_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, SEPARATOR: 102, "unknown": 100, "padding": 0, "mask": 103},
}
"""The ids of special tokens in files that do not name them, by tokenizer.ggml.model, as in llama.cpp."""


def sentencepiece_backend(header: GgufHeader, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    """SentencePiece BPE, which merges the two neighbours whose union has the highest score (Kudo and Richardson 2018,
    arXiv 1808.06226).

    Spaces are written as U+2581, and characters without a token as their bytes. Raises `CheckpointInvalid` for scores
    or types that do not fit the tokens, and if byte tokens or the unknown token are missing.
    """
    scores, types = header.metadata.get("tokenizer.ggml.scores"), header.integers("tokenizer.ggml.token_type")
    if not isinstance(scores, tuple) or len(scores) != len(tokens) or len(types) != len(tokens):
        raise CheckpointInvalid.of(header.path, "the vocabulary does not have a score and a type for each token")
    if types.count(BYTE_TOKEN) != BYTES:
        raise CheckpointInvalid.of(header.path, f"{types.count(BYTE_TOKEN)} byte tokens; needed: {BYTES}")
    unknown = _named(header, tokens, "unknown")
    ranked = [place for place, kind in enumerate(types) if kind in (NORMAL_TOKEN, USER_DEFINED_TOKEN)]
    ranked.sort(key=lambda place: -scores[place])
    model = models.BPE(
        vocab={token: place for place, token in enumerate(tokens)},
        merges=list(ranked_merges({tokens[place]: place for place in ranked})),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefixed = header.flag("tokenizer.ggml.add_space_prefix", default=True)
    before = [normalizers.Prepend(BLANK)] if prefixed else []
    after = [decoders.Strip(content=" ", left=1)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", BLANK)])
    spelled = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spelled, *after])
    return backend


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    """The tokenizer of the file: byte-level BPE ("gpt2"), sentencepiece's BPE ("llama"), WordPiece ("bert"), or single
    characters ("rwkv").

    Raises `UnknownName` for an unsupported tokenizer model or pre-tokenizer, and `CheckpointInvalid` for an
    inconsistent vocabulary.
    """
    kind = header.text("tokenizer.ggml.model")
    if kind not in BACKENDS:
        raise UnknownName.of("GGUF tokenizer model", kind, BACKENDS)
    tokens = header.texts("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointInvalid.of(header.path, "a token of the vocabulary is given twice")
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


ESCAPES = re.compile(r"(?:\\x[0-9a-f]{2})+")


def _character_backend(header: GgufHeader, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    """A vocabulary of single characters, as `attn models export` writes it: RWKV's longest match, of one character.

    Raises `Incompatible` for longer tokens, for which tokenizer.json has no such rule.
    """
    spelled = [
        bytes.fromhex(token.replace("\\x", "")).decode(errors="replace") if ESCAPES.fullmatch(token) else ""
        for token in tokens
    ]
    if any(len(character) != 1 for character in spelled):
        raise Incompatible(f"{header.path}: an RWKV vocabulary of more than single characters is not supported")
    return character_backend(spelled)


BACKENDS: dict[str, Callable[[GgufHeader, tuple[str, ...]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_backend,
    "llama": sentencepiece_backend,
    "rwkv": _character_backend,
    "bert": _word_piece_backend,
}
"""The functions that build a tokenizer, by tokenizer.ggml.model."""


def _merged_model(header: GgufHeader, tokens: tuple[str, ...]) -> models.BPE:
    merges = []
    for merge in header.texts("tokenizer.ggml.merges"):
        first, space, second = merge.partition(" ")
        if not (first and space and second) or " " in second:
            raise CheckpointInvalid.of(header.path, f"the merge {merge[:60]!r} is not two tokens")
        merges.append((first, second))
    vocabulary = {token: place for place, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False)
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens for example
        raise CheckpointInvalid.of(header.path, f"the vocabulary is inconsistent: {error}") from error


def _add_special_tokens(backend: tokenizers.Tokenizer, header: GgufHeader, tokens: tuple[str, ...]) -> None:
    types = header.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointInvalid.of(header.path, f"{len(types)} token types for {len(tokens)} tokens")
    kinds = {CONTROL_TOKEN: True, UNKNOWN_TOKEN: True, USER_DEFINED_TOKEN: False}
    added = [
        AddedToken(token, normalized=False, special=kinds[kind])
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds
    ]
    backend.add_tokens(added)


def _add_ends(backend: tokenizers.Tokenizer, header: GgufHeader, tokens: tuple[str, ...], kind: str) -> None:
    """Add the tokens with which every text begins and ends."""
    if kind == "bert":
        set_ends(backend, _named(header, tokens, _first(header)), _named(header, tokens, SEPARATOR))
        return
    begins = kind == "llama" or (PRE in header.metadata and pre_tokenizer_named(header.text(PRE)).begins)
    wanted = {"bos": begins, "eos": False}
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
