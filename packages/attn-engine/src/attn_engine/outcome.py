"""What a step brings to one sequence."""

from __future__ import annotations

from typing import NamedTuple

from attn_core.errors import InternalError

from attn_engine.event import FinishReason, ScoredToken
from attn_engine.sequence import Sequence

NOT_FINITE = "the model's logits are not finite numbers"


class NoTokenError(InternalError):
    """What the model says of the next token is no distribution."""

    reason = "NO_TOKEN"


class Progress(NamedTuple):
    """News of one sequence; `reason` says why it ends, None while it goes on."""

    sequence: Sequence
    tokens: tuple[ScoredToken, ...]
    text: str = ""
    reason: FinishReason | None = None
    error: Exception | None = None

    def then(self, later: Progress) -> Progress:
        """Both together."""
        tokens, text = self.tokens + later.tokens, self.text + later.text
        return Progress(self.sequence, tokens, text, later.reason, later.error)
