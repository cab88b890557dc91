"""What a client says and hears, in the engine's terms and back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attn_engine
from attn_client.results.inference import Alternative, Chunk, FinishReason, Token, Usage
from attn_client.sampling import ChatMessage, Prompt, Sampling, Sourced
from attn_core.errors import AttnError, DeadlineExceeded, InternalError, InvalidValue, Unavailable
from attn_engine import Event, Finish, RequestUsage, ScoredToken
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.tokenizer import decoder_start_ids, encoder_input_ids

SPELLINGS_KEPT = 65536
OTHER_NAMES = {"ignore_eos": "ignore_end", "top_logprobs": "alternatives"}
FINISHES = {
    attn_engine.FinishReason.END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    attn_engine.FinishReason.STOP: FinishReason.STOP,
    attn_engine.FinishReason.LENGTH: FinishReason.LENGTH,
}


class Words:
    """Reads prompts and spells tokens as one tokenizer does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = lru_cache(SPELLINGS_KEPT)(lambda token: tokenizer.decode([token], skip_special=False))

    def read(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of text, a conversation or token ids; raises `InvalidValue` where there are none."""
        if isinstance(prompt, Sourced):
            begin = prompt.begin
            if begin and not isinstance(begin, str):
                return tuple(begin)
            return decoder_start_ids(self._tokenizer, self._tokenizer.encode(str(begin or ""), add_special=False))
        if isinstance(prompt, str):
            ids = tuple(self._tokenizer.encode(prompt))
        else:
            turns = [turn for turn in prompt if isinstance(turn, ChatMessage)]
            if turns and len(turns) < len(prompt):
                raise InvalidValue.of("prompt", prompt, "text, token ids, or ChatMessages")
            said = [{"role": turn.role, "content": turn.content} for turn in turns]
            ids = tuple(self._tokenizer.encode_chat(said)) if turns else tuple(prompt)  # type: ignore[arg-type]
        if not ids:
            raise InvalidValue.of("prompt", "no tokens", "at least one token")
        return ids

    def source(self, prompt: Prompt) -> tuple[int, ...] | None:
        """The token ids of the source, None where the prompt has none."""
        if not isinstance(prompt, Sourced):
            return None
        return (
            encoder_input_ids(self._tokenizer, prompt.source)
            if isinstance(prompt.source, str)
            else tuple(prompt.source)
        )

    def chunk(self, event: Event) -> Chunk:
        """News of a completion; raises the error that ended it."""
        tokens = tuple(self._token(token) for token in event.tokens)
        if event.finish is None:
            return Chunk(text=event.text, tokens=tokens, choice=event.choice)
        _raise_failure(event.finish)
        return Chunk(
            text=event.text,
            tokens=tokens,
            finish_reason=FINISHES.get(event.finish.reason),
            stop=event.finish.stop,
            usage=_usage(event.usage) if event.usage else None,
            choice=event.choice,
            score=event.finish.score,
        )

    def _token(self, token: ScoredToken) -> Token:
        others = tuple(Alternative(id=i, text=self._text(i), logprob=logprob) for i, logprob in token.alternatives)
        return Token(id=token.id, text=self._text(token.id), logprob=token.logprob, alternatives=others)


def _usage(cost: RequestUsage) -> Usage:
    return Usage(
        prompt_tokens=cost.prompt_tokens,
        cached_tokens=min(cost.shared_tokens, cost.prompt_tokens),
        completion_tokens=cost.new_tokens,
    )


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The fields of the engine's sampling that are given; raises `InvalidValue` for a grammar of two kinds."""
    given = {name: value for name, value in vars(sampling).items() if value is not None}
    grammar, beams = given.pop("grammar", None), given.pop("beams", None)
    fields = {OTHER_NAMES.get(name, name): value for name, value in given.items()}
    if grammar is not None:
        kind = grammar.message().WhichOneof("kind")
        fields["grammar"] = attn_engine.Grammar(kind, getattr(grammar, kind))
    if beams is not None:
        fields["beams"] = attn_engine.Beams(**vars(beams))
    return fields


def _raise_failure(finish: Finish) -> None:
    failures: dict[attn_engine.FinishReason, AttnError] = {
        attn_engine.FinishReason.DEADLINE: DeadlineExceeded("the time was over before the completion was whole"),
        attn_engine.FinishReason.CANCELLED: Unavailable("the completion was cancelled"),
        attn_engine.FinishReason.FAILED: finish.error or InternalError("the engine failed"),
    }
    if finish.reason in failures:
        raise failures[finish.reason]
