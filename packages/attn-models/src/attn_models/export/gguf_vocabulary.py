"""The keys of a GGUF header that describe a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from attn_core.errors import Incompatible

from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.gguf import BYTE_TOKEN, CONTROL_TOKEN, NORMAL_TOKEN, USER_DEFINED_TOKEN
from attn_models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from attn_models.tokenizers.vocabulary import BLANK

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
UNUSED_TOKEN = 5
PREFIX = "tokenizer.ggml."
USUAL = ("gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-v3")
"""The names that are tried first, of those that split texts alike."""


def vocabulary_keys(tokenizer: Tokenizer | None, size: int) -> dict[str, Value]:
    """The keys of a tokenizer for an embedding of `size` rows.

    Byte-level BPE is llama.cpp's "gpt2", SentencePiece's BPE its "llama". A vocabulary of single characters is written
    as its "rwkv", which always takes the longest token that fits, and has no special tokens. Raises `Incompatible` for
    any other kind of tokenizer.
    """
    if tokenizer is None:
        return {f"{PREFIX}model": "none"}
    described = json.loads(tokenizer.backend.to_str())
    kind = described["model"]["type"]
    tokens = [tokenizer.token(place) if place < tokenizer.vocab_size else "" for place in range(size)]
    if tokenizer.characters is not None and len(tokenizer.characters) == size:
        # Bytes that llama.cpp's reader would take for the start of an escape are written in hexadecimal.
        spelled = ["".join(f"\\x{byte:02x}" for byte in token.encode()) for token in tokens]
        return {f"{PREFIX}model": "rwkv", f"{PREFIX}tokens": spelled, f"{PREFIX}token_type": [NORMAL_TOKEN] * size}
    if kind != "BPE":
        rule = "llama.cpp has byte-level BPE, SentencePiece's BPE and vocabularies of single characters"
        raise Incompatible(f"a tokenizer of the kind {kind} cannot be written as GGUF: {rule}", field="tokenizer")
    types = _types(tokenizer, tokens)
    # Rows of the embedding without a token need a text of their own.
    texts = [token or f"[PAD{place}]" for place, token in enumerate(tokens)]
    keys: dict[str, Value] = {f"{PREFIX}tokens": texts, f"{PREFIX}token_type": types}
    if described["model"].get("byte_fallback"):
        keys |= _sentencepiece(described, texts, types)
    else:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
        keys |= {f"{PREFIX}model": "gpt2", f"{PREFIX}pre": _pre_tokenizer(tokenizer), f"{PREFIX}merges": merges}
    return keys | _special(tokenizer)


def _types(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    types = []
    for place, token in enumerate(tokens):
        if not token:
            types.append(UNUSED_TOKEN)
        elif place in added:
            types.append(CONTROL_TOKEN if added[place].special else USER_DEFINED_TOKEN)
        else:
            types.append(BYTE_TOKEN if tokenizer.joins_bytes(place) else NORMAL_TOKEN)
    return types


def _sentencepiece(described: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Value]:
    """The keys of SentencePiece's BPE: a token's score is the negated rank of the merge that makes it."""
    if f'"content":"{BLANK}"' not in json.dumps(described, ensure_ascii=False, separators=(",", ":")):
        raise Incompatible("a BPE tokenizer with byte fallback that does not replace spaces cannot be written as GGUF")
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(described["model"]["merges"]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault("".join(pair), rank)
    ordinary = [kind == NORMAL_TOKEN for kind in types]
    scores = [
        -float(ranks.get(token, len(ranks))) if normal else 0.0 for token, normal in zip(tokens, ordinary, strict=True)
    ]
    prefixed = any(mark in json.dumps(described) for mark in ('"Prepend"', '"prepend_scheme": "first"'))
    return {f"{PREFIX}model": "llama", f"{PREFIX}scores": scores, f"{PREFIX}add_space_prefix": prefixed}


def _pre_tokenizer(tokenizer: Tokenizer) -> str:
    """llama.cpp's name of the pre-tokenizer, which splits texts before merging."""
    given = _steps(tokenizer.backend)
    for name in sorted(PRE_TOKENIZERS, key=lambda name: name not in USUAL):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        PRE_TOKENIZERS[name].apply(backend)
        if _steps(backend) == given:
            return name
    rule = f"known: {', '.join(PRE_TOKENIZERS)}"
    raise Incompatible(f"the pre-tokenizer {json.dumps(given)} has no name in GGUF files; {rule}", field="tokenizer")


def _steps(backend: tokenizers.Tokenizer) -> list[Any]:
    """What decides the pieces of a text, without `trim_offsets` and an empty normalizer, which change none."""
    described = json.loads(backend.to_str())
    nothing = {"type": "Sequence", "normalizers": []}
    normalizer = None if described["normalizer"] == nothing else described["normalizer"]
    found: list[Any] = [normalizer, bool(described["model"].get("ignore_merges"))]
    pending = [described["pre_tokenizer"]]
    while pending:
        step = pending.pop(0)
        if step is not None and step["type"] == "Sequence":
            pending = [*step["pretokenizers"], *pending]
        else:
            found.append({key: value for key, value in (step or {}).items() if key != "trim_offsets"})
    return found


def _special(tokenizer: Tokenizer) -> dict[str, Value]:
    """The special tokens, whether texts begin with one, and the chat template."""
    ids = {"bos": tokenizer.bos_id, "padding": tokenizer.pad_id, "unknown": tokenizer.unk_id}
    ids["eos"] = tokenizer.id(tokenizer.settings.eos_token) if tokenizer.settings.eos_token else None
    keys: dict[str, Value] = {f"{PREFIX}{name}_token_id": value for name, value in ids.items() if value is not None}
    if ids["eos"] is None:
        rule = "llama.cpp would take token 11 for it"
        raise Incompatible(f"a BPE tokenizer without an end token cannot be written as GGUF: {rule}", field="tokenizer")
    keys.setdefault(f"{PREFIX}bos_token_id", ids["eos"])
    others = tokenizer.end_ids - {ids["eos"]}
    if others:
        keys[f"{PREFIX}eot_token_id"] = min(others)
    sample = tokenizer.encode("a")
    keys[f"{PREFIX}add_bos_token"] = bool(sample) and sample[0] == ids["bos"]
    keys[f"{PREFIX}add_eos_token"] = bool(sample) and sample[-1] in tokenizer.end_ids
    if tokenizer.settings.chat_template is not None:
        keys["tokenizer.chat_template"] = tokenizer.settings.chat_template
    return keys
