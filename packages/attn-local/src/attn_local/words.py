"""What a client says and hears, in the engine's terms and back."""

from __future__ import annotations

from typing import Any

import attn_engine
import attn_schema
from attn_client.results.inference import Alternative, Chunk, FinishReason, Token, Usage
from attn_client.sampling import ChatMessage, Prompt, Sampling, Sourced
from attn_core.errors import InvalidValue
from attn_engine import RequestOutput
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.tokenizer import decoder_start_ids, encoder_input_ids

OTHER_NAMES = {"completions": "n", "guesses": "num_speculative_tokens"}
EARLY_STOPPING = {"full": "true", "hopeless": "false", "never": "never"}
FINISHES = {
    attn_engine.FinishReason.END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    attn_engine.FinishReason.STOP: FinishReason.STOP,
    attn_engine.FinishReason.LENGTH: FinishReason.LENGTH,
}


class Words:
    """Reads prompts as one tokenizer does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

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

    def chunk(self, output: RequestOutput) -> Chunk:
        """The output of a completion; raises the error that ended it."""
        if output.error is not None:
            raise output.error
        delta = output.delta
        return Chunk(
            text=delta.text,
            tokens=tuple(_token(token) for token in delta.tokens),
            finish_reason=FINISHES[delta.finish_reason] if delta.finish_reason else None,
            stop=delta.stop_reason,
            usage=_usage(delta.usage) if delta.usage else None,
            choice=delta.index,
            score=delta.score,
        )


def _token(token: attn_schema.Token) -> Token:
    others = tuple(Alternative(id=t.id, text=t.text, logprob=t.logprob) for t in token.top_logprobs)
    return Token(id=token.id, text=token.text, logprob=token.logprob, alternatives=others)


def _usage(usage: attn_schema.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The fields of the engine's sampling that are given; raises `InvalidValue` for a grammar of two kinds."""
    given = {name: value for name, value in vars(sampling).items() if value is not None}
    grammar, beams = given.pop("grammar", None), given.pop("beams", None)
    fields = {OTHER_NAMES.get(name, name): value for name, value in given.items()}
    if grammar is not None:
        kind = grammar.message().WhichOneof("kind")
        fields["structured_output"] = attn_engine.StructuredOutput(**{kind: getattr(grammar, kind)})
    if beams is not None:
        fields |= {
            "num_beams": beams.width,
            "length_penalty": beams.length_penalty,
            "early_stopping": EARLY_STOPPING[beams.stopping],
        }
    return fields
