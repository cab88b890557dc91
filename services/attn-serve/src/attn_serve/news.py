"""The engine's events as answers, with every token spelled."""

from __future__ import annotations

from functools import lru_cache

from attn_core.errors import AttnError, DeadlineExceeded, InternalError, Unavailable
from attn_engine import Event, Finish, FinishReason, ScoredToken
from attn_models.tokenizers import Tokenizer

from attn_serve.answers import Alternative, Chunk, TokenAnswer, UsageAnswer
from attn_serve.answers import Finish as FinishAnswer

FINISHES = {
    FinishReason.END_OF_SEQUENCE: FinishAnswer.END,
    FinishReason.STOP: FinishAnswer.STOP,
    FinishReason.LENGTH: FinishAnswer.LENGTH,
    FinishReason.SCORED: FinishAnswer.LENGTH,
}
SPELLINGS_KEPT = 65536


class Spelling:
    """The text of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = lru_cache(SPELLINGS_KEPT)(lambda token: tokenizer.decode([token], skip_special=False))

    def token(self, token: int) -> TokenAnswer:
        """A token without a log probability."""
        return TokenAnswer(token, self._text(token))

    def scored(self, token: ScoredToken) -> TokenAnswer:
        """A token with what the model thought of it."""
        others = tuple(Alternative(other, self._text(other), logprob) for other, logprob in token.alternatives)
        return TokenAnswer(token.id, self._text(token.id), token.logprob, others)


def chunk_of(event: Event, spelling: Spelling) -> Chunk:
    """An event of the engine as an answer."""
    tokens = tuple(spelling.scored(token) for token in event.tokens)
    finish = event.finish
    if finish is None:
        return Chunk(event.request, tokens, event.text)
    usage = UsageAnswer(prompt=finish.usage.prompt_tokens, cached=0, completion=finish.usage.new_tokens)
    return Chunk(
        event.request,
        tokens,
        event.text,
        finish=FINISHES.get(finish.reason),
        stop=finish.stop or "",
        usage=usage,
        error=_error(finish),
    )


def _error(finish: Finish) -> AttnError | None:
    if finish.reason is FinishReason.DEADLINE:
        return DeadlineExceeded("the deadline passed before the completion was whole")
    if finish.reason is FinishReason.CANCELLED:
        return Unavailable("the completion was cancelled")
    if finish.reason is FinishReason.FAILED:
        return finish.error or InternalError("the engine failed")
    return None
