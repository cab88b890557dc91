"""Wire messages to plain values and back."""

from __future__ import annotations

import uuid
from typing import Any

from attn.v1 import common_pb2, inference_pb2, model_pb2
from attn_core.errors import InvalidValue
from attn_engine import StructuredOutput
from attn_gateway import Call

from attn_serve.answers import Chunk, EmbeddingsAnswer, Finish, MapAnswer, SequenceAnswer, TokenAnswer, UsageAnswer
from attn_serve.requests import EngineSettings, Generation, PromptInput, Scored, SourceInput, TextsWanted

FINISH = {
    Finish.END: inference_pb2.FINISH_REASON_END_OF_SEQUENCE,
    Finish.STOP: inference_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}

EARLY_STOPPING = {
    inference_pb2.BEAM_STOPPING_UNSPECIFIED: "false",
    inference_pb2.BEAM_STOPPING_HOPELESS: "false",
    inference_pb2.BEAM_STOPPING_FULL: "true",
    inference_pb2.BEAM_STOPPING_NEVER: "never",
}

OPTIONAL_SAMPLING = {
    "max_new_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "top_logprobs": "top_logprobs",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "min_new_tokens": "min_new_tokens",
    "completions": "n",
    "typical_p": "typical_p",
    "guesses": "num_speculative_tokens",
}
"""Fields of the wire's Sampling that may be absent, and their names in the engine's Sampling."""


def prompt_of(message: common_pb2.Prompt, field: str = "prompt") -> PromptInput:
    """The prompt; raises `InvalidValue` where neither it nor a source is given."""
    kind = message.WhichOneof("kind")
    source = source_of(message.source, f"{field}.source") if message.HasField("source") else None
    if kind == "text":
        return PromptInput(text=message.text, source=source)
    if kind == "tokens":
        return PromptInput(tokens=tuple(message.tokens.ids), source=source)
    if kind == "chat":
        return PromptInput(chat=tuple((turn.role, turn.content) for turn in message.chat.messages), source=source)
    if source is None:
        raise InvalidValue.of(field, None, "text, tokens or chat")
    return PromptInput(text="", source=source)


def source_of(message: common_pb2.Source, field: str) -> SourceInput:
    """The source; raises `InvalidValue` where it is of no form."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidValue.of(field, None, "text or tokens")
    if kind == "text":
        return SourceInput(text=message.text)
    return SourceInput(tokens=tuple(message.tokens.ids))


def sampling_of(message: inference_pb2.Sampling) -> dict[str, Any]:
    """The engine's sampling fields that the caller gave."""
    given: dict[str, Any] = {
        name: getattr(message, wire)
        for wire, name in OPTIONAL_SAMPLING.items()
        if message.HasField(wire)  # type: ignore[arg-type]
    }
    if message.stop:
        given["stop"] = tuple(message.stop)
    if message.ignore_eos:
        given["ignore_eos"] = True
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    if message.HasField("grammar"):
        kind = message.grammar.WhichOneof("kind")
        if kind is None:
            raise InvalidValue.of("sampling.grammar", "nothing", "json_schema, regex or lark")
        given["structured_output"] = StructuredOutput(**{kind: getattr(message.grammar, kind)})
    if message.HasField("beams"):
        given |= _beams_of(message.beams)
    return given


def _beams_of(message: inference_pb2.BeamSearch) -> dict[str, Any]:
    if message.stopping not in EARLY_STOPPING:
        raise InvalidValue.of("sampling.beams.stopping", message.stopping, "a value of BeamStopping")
    given = {"length_penalty": message.length_penalty} if message.HasField("length_penalty") else {}
    return {"num_beams": message.width, "early_stopping": EARLY_STOPPING[message.stopping], **given}


def generation_of(request: inference_pb2.GenerateRequest, call: Call) -> Generation:
    """The completion that a call asks for, under an id of its own."""
    return Generation(
        id=uuid.uuid4().hex,
        prompt=prompt_of(request.prompt),
        sampling=sampling_of(request.sampling),
        seconds=call.remaining(),
        tenant=call.tenant,
    )


def scored_of(request: inference_pb2.ScoreRequest, call: Call) -> list[Scored]:
    """The prompts that a call wants scored, each under an id of its own."""
    return [
        Scored(
            id=uuid.uuid4().hex,
            prompt=prompt_of(prompt, f"prompts[{place}]"),
            alternatives=request.top_logprobs,
            seconds=call.remaining(),
            tenant=call.tenant,
        )
        for place, prompt in enumerate(request.prompts)
    ]


def texts_of(request: inference_pb2.EmbedRequest, call: Call) -> TextsWanted:
    """The texts that a call wants embedded, under an id of its own."""
    return TextsWanted(id=uuid.uuid4().hex, texts=tuple(request.texts), seconds=call.remaining())


def settings_of(message: model_pb2.EngineOptions) -> EngineSettings:
    """How the caller wants the model run; what is left out stays the default."""
    given: dict[str, Any] = {
        name: getattr(message, name)
        for name in ("dtype", "device", "kernel", "weights", "cache", "draft")
        if getattr(message, name)
    }
    for name in ("max_sequences", "max_batch_tokens", "state_bytes", "guesses", "offload_bytes", "branches"):
        if message.HasField(name):
            given[name] = getattr(message, name)
    return EngineSettings(**given)


def token_message(token: TokenAnswer) -> common_pb2.Token:
    """A token on the wire."""
    alternatives = [
        common_pb2.TokenAlternative(id=other.id, text=other.text, logprob=other.logprob) for other in token.alternatives
    ]
    return common_pb2.Token(id=token.id, text=token.text, logprob=token.logprob, alternatives=alternatives)


def usage_message(usage: UsageAnswer) -> common_pb2.Usage:
    """Token counts on the wire."""
    return common_pb2.Usage(prompt_tokens=usage.prompt, cached_tokens=usage.cached, completion_tokens=usage.completion)


def chunk_message(chunk: Chunk) -> inference_pb2.GenerateResponse:
    """One message of a completion's stream."""
    tokens = [token_message(token) for token in chunk.tokens]
    response = inference_pb2.GenerateResponse(tokens=tokens, text=chunk.text, choice=chunk.choice)
    if chunk.finish is not None:
        response.finish_reason = FINISH[chunk.finish]
        response.stop = chunk.stop
    if chunk.score is not None:
        response.score = chunk.score
    if chunk.usage is not None:
        response.usage.CopyFrom(usage_message(chunk.usage))
    return response


def score_message(score: SequenceAnswer) -> inference_pb2.SequenceScore:
    """The score of one sequence on the wire."""
    return inference_pb2.SequenceScore(tokens=[token_message(token) for token in score.tokens], sum_logprob=score.total)


def embeddings_message(answer: EmbeddingsAnswer) -> inference_pb2.EmbedResponse:
    """The vectors of texts on the wire."""
    return inference_pb2.EmbedResponse(
        embeddings=float_tensor(answer.shape, answer.vectors),
        usage=usage_message(UsageAnswer(prompt=answer.tokens, cached=0, completion=0)),
    )


def float_tensor(shape: tuple[int, ...], data: bytes) -> common_pb2.Tensor:
    """Numbers of float32, little-endian, row-major, on the wire."""
    return common_pb2.Tensor(element_type=common_pb2.ELEMENT_TYPE_FLOAT32, shape=shape, data=data)


def map_message(answer: MapAnswer) -> inference_pb2.AttentionMapsResponse:
    """The attention map of one layer on the wire."""
    return inference_pb2.AttentionMapsResponse(
        layer=answer.layer,
        heads=answer.heads,
        weights=float_tensor(answer.shape, answer.weights),
        query_tokens=answer.labels,
        key_tokens=answer.key_labels,
        mechanism=answer.mechanism,
    )
