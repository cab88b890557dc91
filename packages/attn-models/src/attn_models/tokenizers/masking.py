"""A tokenizer with a token that stands for one to be guessed."""

from __future__ import annotations

import dataclasses

import tokenizers

from attn_models.tokenizers.tokenizer import Tokenizer

MASK = "<mask>"


def with_mask(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer itself where it has such a token, else one with `<mask>` behind its vocabulary."""
    if tokenizer.mask_id is not None:
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens([MASK])
    return Tokenizer(backend, dataclasses.replace(tokenizer.settings, mask_token=MASK))
