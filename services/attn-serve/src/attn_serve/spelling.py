"""The text of single tokens."""

from __future__ import annotations

from functools import lru_cache

from attn_models.tokenizers import Tokenizer

from attn_serve.answers import TokenAnswer

SPELLINGS_KEPT = 65536


class Spelling:
    """Spells tokens as one model's tokenizer does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = lru_cache(SPELLINGS_KEPT)(lambda token: tokenizer.decode([token], skip_special=False))

    def token(self, token: int) -> TokenAnswer:
        """A token without a log probability."""
        return TokenAnswer(token, self._text(token))
