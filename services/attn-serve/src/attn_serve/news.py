"""The engine's events as answers, with every token spelled."""

from __future__ import annotations

from attn_core.errors import AttnError, DeadlineExceeded, InternalError, Unavailable
from attn_engine import Event, Finish, FinishReason

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
    # A request that was preempted may have found its own beginning again: no more than its prompt counts.
    cached = min(finish.usage.shared_tokens, finish.usage.prompt_tokens)
    usage = UsageAnswer(prompt=finish.usage.prompt_tokens, cached=cached, completion=finish.usage.new_tokens)
    return Chunk(
        event.request,
        tokens,
        event.text,
        finish=FINISHES.get(finish.reason),
        stop=finish.stop or "",
        usage=usage,
        error=_error(finish),
        choice=event.choice,
        last=event.last,
    )


def _error(finish: Finish) -> AttnError | None:
    if finish.reason is FinishReason.DEADLINE:
        return DeadlineExceeded("the deadline passed before the completion was whole")
    if finish.reason is FinishReason.CANCELLED:
        return Unavailable("the completion was cancelled")
    if finish.reason is FinishReason.FAILED:
        return finish.error or InternalError("the engine failed")
    return None
