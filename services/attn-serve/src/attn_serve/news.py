"""The engine's events as answers, with every token spelled."""

from __future__ import annotations

from attn_core.errors import AttnError, DeadlineExceeded, InternalError, Unavailable
from attn_engine import Event, Finish, FinishReason, RequestUsage

from attn_serve.answers import Chunk, UsageAnswer
from attn_serve.answers import Finish as FinishAnswer
from attn_serve.spelling import Spelling

FINISHES = {
    FinishReason.END_OF_SEQUENCE: FinishAnswer.END,
    FinishReason.STOP: FinishAnswer.STOP,
    FinishReason.LENGTH: FinishAnswer.LENGTH,
    FinishReason.SCORED: FinishAnswer.LENGTH,
}


def chunk_of(event: Event, spelling: Spelling) -> Chunk:
    """An event of the engine as an answer."""
    tokens = tuple(spelling.scored(token) for token in event.tokens)
    finish = event.finish
    if finish is None:
        return Chunk(event.request, tokens, event.text, choice=event.choice)
    return Chunk(
        event.request,
        tokens,
        event.text,
        finish=FINISHES.get(finish.reason),
        stop=finish.stop or "",
        usage=_usage(event.usage) if event.usage else None,
        error=_error(finish),
        choice=event.choice,
        score=finish.score,
    )


def _usage(usage: RequestUsage) -> UsageAnswer:
    # A request that was preempted may have found its own beginning again: no more than its prompt counts.
    cached = min(usage.shared_tokens, usage.prompt_tokens)
    return UsageAnswer(prompt=usage.prompt_tokens, cached=cached, completion=usage.new_tokens)


def _error(finish: Finish) -> AttnError | None:
    if finish.reason is FinishReason.DEADLINE:
        return DeadlineExceeded("the deadline passed before the answer was whole")
    if finish.reason is FinishReason.CANCELLED:
        return Unavailable("the request was cancelled")
    if finish.reason is FinishReason.FAILED:
        return finish.error or InternalError("the engine failed")
    return None
