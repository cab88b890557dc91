"""Tokenizers from the sentencepiece vocabularies that GGUF files carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tokenizers
from attn_core.errors import CheckpointInvalid
from tokenizers import decoders, models, normalizers

from attn_models.tokenizers.byte_alphabet import BLANK
from attn_models.weights.gguf_header import GgufHeader

NORMAL_TOKEN = 1
BYTE_TOKEN = 6
BYTES = 256


def sentencepiece_backend(header: GgufHeader, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    """BPE that merges the two neighbours whose union scores highest (Kudo and Richardson 2018, arXiv 1808.06226).

    Blanks are written as U+2581, and characters that are no token as their bytes. Raises CheckpointInvalid for scores
    or types that do not fit the tokens, bytes that are missing, or an unknown token that is not there.
    """
    scores, types = header.metadata.get("tokenizer.ggml.scores"), header.integers("tokenizer.ggml.token_type")
    if not isinstance(scores, tuple) or len(scores) != len(tokens) or len(types) != len(tokens):
        raise CheckpointInvalid.of(header.path, "the vocabulary does not have a score and a type for each token")
    if types.count(BYTE_TOKEN) != BYTES:
        raise CheckpointInvalid.of(header.path, f"{types.count(BYTE_TOKEN)} byte tokens; needed: {BYTES}")
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id")
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise CheckpointInvalid.of(header.path, f"tokenizer.ggml.unknown_token_id is {unknown!r}")
    ranked = [place for place, kind in enumerate(types) if kind == NORMAL_TOKEN]
    ranked.sort(key=lambda place: -scores[place])
    model = models.BPE(
        vocab={token: place for place, token in enumerate(tokens)},
        merges=list(_merges({tokens[place]: None for place in ranked})),
        unk_token=tokens[unknown],
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


def _merges(ranked: Mapping[str, None]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens whose union is a token, those of the best union first."""
    for token in ranked:
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ranked and second in ranked:
                yield first, second
