"""The text of single tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from attn_models.tokenizers import Tokenizer

from attn_serve.answers import Alternative, TokenAnswer

if TYPE_CHECKING:
    from attn_engine import ScoredToken

SPELLINGS_KEPT = 65536


class Spelling:
    """Spells tokens as one model's tokenizer does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = lru_cache(SPELLINGS_KEPT)(lambda token: tokenizer.decode([token], skip_special=False))

    def token(self, token: int) -> TokenAnswer:
        """A token without a log probability."""
        return TokenAnswer(token, self._text(token))

    def scored(self, token: ScoredToken) -> TokenAnswer:
        """A token with what the model thought of it."""
        others = tuple(Alternative(other, self._text(other), logprob) for other, logprob in token.alternatives)
        return TokenAnswer(token.id, self._text(token.id), token.logprob, others)
