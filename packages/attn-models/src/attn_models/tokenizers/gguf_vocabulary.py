"""Tokenizers from the vocabularies that GGUF files carry."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from attn_core.errors import CheckpointInvalid, UnknownName
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from attn_models.tokenizers.gguf_sentencepiece import sentencepiece_backend
from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.tokenizers.tokenizer import Tokenizer
from attn_models.weights.gguf_header import GgufHeader

CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _single_digits,
}
"""How text is cut before merging, by tokenizer.ggml.pre."""


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    """The tokenizer of the file: byte-level BPE ("gpt2"), or sentencepiece's BPE ("llama").

    Raises UnknownName for a tokenizer model or pre-tokenizer not known here, and CheckpointInvalid for
    a vocabulary that contradicts itself.
    """
    kind = header.text("tokenizer.ggml.model")
    if kind not in BACKENDS:
        raise UnknownName.of("GGUF tokenizer model", kind, BACKENDS)
    tokens = header.texts("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointInvalid.of(header.path, "a token of the vocabulary is given twice")
    backend = BACKENDS[kind](header, tokens)
    _add_special_tokens(backend, header, tokens)
    _begin_with_bos(backend, header, tokens)
    return Tokenizer(backend, _settings(header, tokens))


def _byte_level_backend(header: GgufHeader, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    cut = header.text("tokenizer.ggml.pre")
    if cut not in PRE_TOKENIZERS:
        raise UnknownName.of("GGUF pre-tokenizer", cut, PRE_TOKENIZERS)
    backend = tokenizers.Tokenizer(_merged_model(header, tokens))
    backend.pre_tokenizer = PRE_TOKENIZERS[cut]()
    backend.decoder = decoders.ByteLevel()
    return backend


BACKENDS: dict[str, Callable[[GgufHeader, tuple[str, ...]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_backend,
    "llama": sentencepiece_backend,
}
"""How text becomes tokens, by tokenizer.ggml.model."""


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
    kinds = {CONTROL_TOKEN: True, USER_DEFINED_TOKEN: False}
    added = [
        AddedToken(token, normalized=False, special=kinds[kind])
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds
    ]
    backend.add_tokens(added)


def _begin_with_bos(backend: tokenizers.Tokenizer, header: GgufHeader, tokens: tuple[str, ...]) -> None:
    bos = _named(header, tokens, "bos")
    if bos is not None and header.flag("tokenizer.ggml.add_bos_token", default=False):
        special = [(bos, tokens.index(bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)


def _settings(header: GgufHeader, tokens: tuple[str, ...]) -> TokenizerSettings:
    template = header.metadata.get("tokenizer.chat_template")
    return TokenizerSettings(
        bos_token=_named(header, tokens, "bos"),
        eos_token=_named(header, tokens, "eos"),
        pad_token=_named(header, tokens, "padding"),
        unk_token=_named(header, tokens, "unknown"),
        chat_template=template if isinstance(template, str) else None,
    )


def _named(header: GgufHeader, tokens: tuple[str, ...], word: str) -> str | None:
    key = f"tokenizer.ggml.{word}_token_id"
    if key not in header.metadata:
        return None
    token_id = header.metadata[key]
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise CheckpointInvalid.of(header.path, f"{key} is {token_id!r}; the vocabulary has {len(tokens)} tokens")
    return tokens[token_id]
