"""How tokens are chosen, and what a prompt may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import cast

from attn.v1 import common_pb2
from attn.v1 import inference_pb2 as pb
from attn_core.errors import InvalidValue
from google.protobuf.descriptor import FieldDescriptor

MESSAGES = frozenset({"stop", "logit_bias", "grammar", "beams"})
"""Fields of the wire's Sampling that cannot simply be set."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """What a completion must match, one of these: a JSON schema, a regular expression or a Lark grammar, as text."""

    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None

    def message(self) -> pb.Grammar:
        """On the wire; raises `InvalidValue` unless exactly one is given."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if len(given) != 1:
            raise InvalidValue.of("grammar", sorted(given) or None, "exactly one of json_schema, regex and lark")
        return pb.Grammar(**given)


STOPPING = {
    "hopeless": pb.BEAM_STOPPING_HOPELESS,
    "full": pb.BEAM_STOPPING_FULL,
    "never": pb.BEAM_STOPPING_NEVER,
}


@dataclass(frozen=True, kw_only=True)
class Beams:
    """A search that keeps the `width` likeliest beginnings at every step.

    A completion scores its log probability over its length to the power of `length_penalty`. Besides where no beginning
    can go on, the search ends, by `stopping`: "hopeless", once `width` completions have ended and the best beginning,
    scored at its present length, is no better than the worst of them; "full", as soon as `width` have ended; "never",
    as "hopeless", but with a positive penalty the best beginning is scored at the greatest length.
    """

    width: int
    length_penalty: float = 1.0
    stopping: str = "hopeless"

    def message(self) -> pb.BeamSearch:
        """On the wire; raises `InvalidValue` for what the wire cannot hold."""
        if self.stopping not in STOPPING:
            raise InvalidValue.of("beams.stopping", self.stopping, ", ".join(STOPPING))
        try:
            return pb.BeamSearch(width=self.width, length_penalty=self.length_penalty, stopping=STOPPING[self.stopping])
        except (ValueError, TypeError) as error:
            raise InvalidValue.of("beams", self, "numbers that the fields can hold") from error


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; None leaves a choice to the server. The server checks the ranges.

    `temperature` 0 takes the likeliest token. `top_logprobs` 0 returns the log probability of the chosen
    tokens, n > 0 those of the n likeliest, too. `stop` strings end the completion and are not part of it.
    `frequency_penalty` lowers a token's logit each time it was generated, `presence_penalty` once; `logit_bias` is
    added by token id. A `grammar` says what the completion must match, and where it ends. `completions` asks for so
    many of one prompt; number i is what a request with the seed `seed + i` gives. `beams` searches for the likeliest
    completions instead of drawing tokens. `guesses` is the most tokens guessed ahead at a step: it makes texts that
    repeat themselves faster and changes none.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int | None = None
    grammar: Grammar | None = None
    completions: int | None = None
    typical_p: float | None = None
    beams: Beams | None = None
    guesses: int | None = None

    def message(self) -> pb.Sampling:
        """On the wire; raises `InvalidValue` for what the wire cannot hold."""
        message = pb.Sampling()
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or item.name in MESSAGES:
                continue
            try:
                setattr(message, item.name, value)
            except (ValueError, TypeError) as error:
                raise InvalidValue.of(
                    item.name, value, _allowed(message.DESCRIPTOR.fields_by_name[item.name])
                ) from error
        message.stop.extend(self.stop)
        try:
            message.logit_bias.update(self.logit_bias)
        except (ValueError, TypeError) as error:
            raise InvalidValue.of("logit_bias", dict(self.logit_bias), "numbers by token id") from error
        if self.grammar is not None:
            message.grammar.CopyFrom(self.grammar.message())
        if self.beams is not None:
            message.beams.CopyFrom(self.beams.message())
        return message


def _allowed(field: FieldDescriptor) -> str:
    """What a field of the wire can hold, for people."""
    ranges = {
        FieldDescriptor.CPPTYPE_INT32: "a whole number from -2**31 to 2**31 - 1",
        FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 to 2**64 - 1",
        FieldDescriptor.CPPTYPE_BOOL: "true or false",
    }
    return ranges.get(field.cpp_type, "a number")


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation; `role` is usually "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class Sourced:
    """A prompt for a model that reads a source: the `source`, and how what is written begins."""

    source: str | Sequence[int]
    begin: str | Sequence[int] = ""


Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sourced
"""Text, token ids, a conversation, or something to translate."""


def prompt_message(prompt: Prompt) -> common_pb2.Prompt:
    """A prompt on the wire; raises `InvalidValue` for anything else."""
    if isinstance(prompt, Sourced):
        message = prompt_message(prompt.begin)
        message.source.CopyFrom(_source_message(prompt.source))
        return message
    if isinstance(prompt, str):
        return common_pb2.Prompt(text=prompt)
    turns = [turn for turn in prompt if isinstance(turn, ChatMessage)]
    if turns and len(turns) == len(prompt):
        said = [common_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns]
        return common_pb2.Prompt(chat=common_pb2.Chat(messages=said))
    try:
        return common_pb2.Prompt(tokens=common_pb2.TokenIds(ids=cast("Sequence[int]", prompt)))
    except (TypeError, ValueError) as error:
        raise InvalidValue.of("prompt", prompt, "text, token ids below 2**31, or ChatMessages") from error


def _source_message(source: str | Sequence[int]) -> common_pb2.Source:
    if isinstance(source, str):
        return common_pb2.Source(text=source)
    return common_pb2.Source(tokens=prompt_message(source).tokens)
