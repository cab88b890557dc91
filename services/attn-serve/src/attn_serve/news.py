"""The engine's outputs as answers."""

from __future__ import annotations

from attn_engine import FinishReason, RequestOutput
from attn_schema import Token, Usage

from attn_serve.answers import Alternative, Chunk, TokenAnswer, UsageAnswer
from attn_serve.answers import Finish as FinishAnswer

FINISHES = {
    FinishReason.END_OF_SEQUENCE: FinishAnswer.END,
    FinishReason.STOP: FinishAnswer.STOP,
    FinishReason.LENGTH: FinishAnswer.LENGTH,
}


def chunk_of(output: RequestOutput) -> Chunk:
    """An output of the engine as an answer."""
    delta = output.delta
    return Chunk(
        output.request_id,
        tuple(_token(token) for token in delta.tokens),
        delta.text,
        finish=FINISHES[delta.finish_reason] if delta.finish_reason else None,
        stop=delta.stop_reason or "",
        usage=_usage(delta.usage) if delta.usage else None,
        error=output.error,
        choice=delta.index,
        score=delta.score,
    )


def _token(token: Token) -> TokenAnswer:
    others = tuple(Alternative(other.id, other.text, other.logprob) for other in token.top_logprobs)
    return TokenAnswer(token.id, token.text, token.logprob, others)


def _usage(usage: Usage) -> UsageAnswer:
    return UsageAnswer(prompt=usage.prompt_tokens, cached=usage.cached_tokens, completion=usage.completion_tokens)
