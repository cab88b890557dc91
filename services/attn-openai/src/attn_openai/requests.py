"""The requests of OpenAI's clients, and their conversion to sampling parameters.

Fields have OpenAI's names, and beyond OpenAI's those of vLLM. Bounds are those of `attn_schema.SamplingParams`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from attn_core.errors import InvalidValue, UserError
from attn_schema import SamplingParams, StructuredOutput
from attn_schema.schema import Checked
from msgspec import Meta

from attn_openai.schemas import compact_schema, schema_of

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `max_tokens` of /v1/completions."""
MAX_PROMPTS = 128
"""The most prompts of one request to /v1/completions."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "background": (False,),
    "best_of": (1,),
    "chat_template_content_format": ("auto", "string"),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Fields of OpenAI and vLLM that this server does not implement, with the values that request its only behaviour."""

IGNORED: Mapping[str, str] = {
    "cache_salt": "prefixes are shared only within a tenant",
    "client_metadata": "a label for the servers of one vendor",
    "metadata": "a label of what is stored",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_retention": "the cache keeps what fits",
    "safety_identifier": "a label of the end user",
}
"""Fields that are accepted with any value and ignored, with the reason."""

SAME_NAMES = (
    "temperature", "top_p", "n", "frequency_penalty", "presence_penalty", "top_k", "min_p", "typical_p",
    "repetition_penalty", "ignore_eos", "stop_token_ids", "allowed_token_ids", "bad_words", "num_beams",
    "length_penalty", "early_stopping", "num_speculative_tokens", "skip_special_tokens",
)  # fmt: skip
"""Fields of requests that have the same name in `SamplingParams`."""

OTHER_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of `SamplingParams` that have another name in requests."""


def says(description: str, **bounds: Any) -> Meta:
    """What a field means, for the OpenAPI document, and its bounds."""
    return Meta(description=description, **bounds)


class StreamOptions(Checked, frozen=True, kw_only=True):
    """Options of a stream."""

    include_usage: Annotated[bool, says("Ends the stream with the usage of the whole request.")] = False
    continuous_usage_stats: Annotated[bool, says("vLLM: the usage so far, in every chunk.")] = False
    include_obfuscation: Annotated[bool, says("Ignored; no padding is added.")] = False


class StructuredOutputs(Checked, frozen=True, kw_only=True):
    """vLLM's form of structured output; exactly one field must be given."""

    json: Annotated[Any, says("JSON schema of the completion, as an object or as text.")] = None
    regex: Annotated[str, says("Regular expression that the whole completion matches.")] | None = None
    choice: Annotated[tuple[str, ...], says("The completion is one of these texts.", min_length=1)] | None = None
    grammar: Annotated[str, says("Lark grammar whose first rule is `start`.")] | None = None

    def wanted(self) -> StructuredOutput:
        """Convert to the engine's `StructuredOutput`; raises `InvalidValue` unless exactly one field is given."""
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidValue.of("structured_outputs", given or None, "exactly one of json, regex, choice and grammar")
        if self.json is not None:
            schema = self.json if isinstance(self.json, str) else compact_schema(self.json, "structured_outputs.json")
            return StructuredOutput(json_schema=schema)
        if self.choice is not None:
            return StructuredOutput(regex="|".join(re.escape(text) for text in self.choice))
        return StructuredOutput(regex=self.regex, lark=self.grammar)


class SamplingFields(Checked, frozen=True, kw_only=True):
    """The common fields of all requests for text. None means that a field was not given."""

    model: Annotated[str, says("Name of a loaded model; GET /v1/models lists them.")]
    max_tokens: Annotated[int, says("Maximum number of tokens to generate.")] | None = None
    temperature: Annotated[float, says("0 is greedy. If not given as the model recommends, else 1.")] | None = None
    top_p: Annotated[float, says("Nucleus sampling.")] | None = None
    n: Annotated[int, says("Number of completions of each prompt.")] | None = None
    stop: Annotated[Any, says("Stop string, or a list of stop strings; the completion ends before the first.")] = None
    seed: Annotated[int, says("Makes sampling reproducible.")] | None = None
    presence_penalty: Annotated[float, says("From -2 to 2.")] | None = None
    frequency_penalty: Annotated[float, says("From -2 to 2.")] | None = None
    logit_bias: Annotated[Any, says("Added to logits, by token id; from -100 to 100.")] = None
    stream: Annotated[bool, says("Answers with server-sent events.")] | None = None
    stream_options: Annotated[StreamOptions, says("Only with stream.")] | None = None
    user: Annotated[str, says("Name of the end user, for the server's log.")] | None = None
    timeout: Annotated[float, says("Seconds after which the request ends with 504.", gt=0)] | None = None
    top_k: Annotated[int, says("vLLM: samples from the k most likely tokens; 0 or -1 from all.")] | None = None
    min_p: Annotated[float, says("vLLM: least probability, relative to the likeliest token's.")] | None = None
    typical_p: Annotated[float, says("Locally typical sampling.")] | None = None
    repetition_penalty: Annotated[float, says("vLLM: above 1 discourages repetition.")] | None = None
    min_tokens: Annotated[int, says("vLLM: no end of sequence before this many tokens.")] | None = None
    ignore_eos: Annotated[bool, says("vLLM: generates past end-of-sequence tokens.")] | None = None
    stop_token_ids: Annotated[tuple[int, ...], says("vLLM: tokens that end the text.")] | None = None
    allowed_token_ids: Annotated[tuple[int, ...], says("vLLM: the only tokens that may come.")] | None = None
    bad_words: Annotated[tuple[str, ...], says("vLLM: texts that are not generated.")] | None = None
    use_beam_search: Annotated[bool, says("vLLM: beam search with n beams.")] | None = None
    num_beams: Annotated[int, says("Beam search with this many beams.")] | None = None
    length_penalty: Annotated[float, says("vLLM: with beam search.")] | None = None
    early_stopping: Annotated[Any, says("vLLM: with beam search; false, true or never.")] = None
    num_speculative_tokens: Annotated[int, says("Draft tokens per step.")] | None = None
    skip_special_tokens: Annotated[bool, says("vLLM: leaves them out of the text, as if not given.")] | None = None
    structured_outputs: Annotated[StructuredOutputs, says("vLLM: constrains the text.")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_options not in {None, StreamOptions()} and not self.stream:
            raise InvalidValue.of("stream_options", "an object", "only with stream: true")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Parse a decoded body.

        Raises `InvalidValue` or `UnknownName`, naming the field that is invalid or unknown.
        """
        ignored = IGNORED.keys() - set(cls.__struct_fields__)
        known = {name: value for name, value in values.items() if value is not None and name not in ignored}
        for name in NEUTRAL.keys() & known.keys() - set(cls.__struct_fields__):
            allowed = NEUTRAL[name]
            if (value := known.pop(name)) not in allowed:
                raise InvalidValue.of(name, value, " or ".join(map(json.dumps, allowed)))
        return cls.from_mapping(known)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(
        self,
        max_new_tokens: int | None,
        *,
        top_logprobs: int | None = None,
        constrained: bool = False,
    ) -> SamplingParams:
        """Convert to `SamplingParams`; raises `InvalidValue` with the name of the field in the request.

        `constrained` says that `structured_output` will be replaced by a grammar of the caller.
        """
        structured_output = UNKNOWN_YET if constrained else None
        values = {name: given for name in SAME_NAMES if (given := getattr(self, name)) is not None}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if self.use_beam_search and self.num_beams is None:
            values["num_beams"] = self.n or 1
        if self.seed is not None:
            values["seed"] = self.seed % 2**64
        if self.structured_outputs is not None:
            if structured_output is not None:
                raise InvalidValue.of("structured_outputs", "given", "left out with response_format or tools")
            structured_output = self.structured_outputs.wanted()
        try:
            return SamplingParams(
                max_new_tokens=max_new_tokens,
                min_new_tokens=self.min_tokens or 0,
                stop=stop_strings(self.stop),
                logit_bias=logit_bias(self.logit_bias),
                top_logprobs=top_logprobs,
                structured_output=structured_output,
                **values,
            )
        except InvalidValue as error:
            raise renamed(error) from error


UNKNOWN_YET = StructuredOutput(regex=".")


def renamed(error: UserError, field: str | None = None) -> InvalidValue:
    """The error with the field's name in requests, or `field`, instead of that in `SamplingParams`."""
    given = str(error.metadata.get("field", ""))
    name = field or OTHER_NAMES.get(given)
    name = name or given
    return InvalidValue(error.message.replace(given, name), **error.metadata | {"field": name})


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The stop strings of a request."""
    if stop is None or isinstance(stop, str):
        return (stop,) if stop else ()
    if isinstance(stop, Sequence):
        return tuple(stop)
    raise InvalidValue.of("stop", stop, "a text or a list of texts")


def logit_bias(given: Any) -> dict[int, float]:
    """Biases by token id; in JSON the ids are strings."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidValue.of("logit_bias", given, "an object of token ids and numbers")
    found = {}
    for key, value in given.items():
        if not (str(key).isascii() and str(key).isdecimal()):
            raise InvalidValue.of("logit_bias", key, "token ids as keys")
        found[int(key)] = value
    return found


def answer_schema(response_format: Any, field: str = "response_format") -> dict[str, Any] | None:
    """The schema for `response_format` (or the flat form of /v1/responses), for llguidance; None for plain text."""
    if response_format is None:
        return None
    if not isinstance(response_format, dict) or not isinstance(response_format.get("type"), str):
        raise InvalidValue.of(field, response_format, "an object with a type")
    kind = response_format["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_of({"type": "object"}, field)
    if kind != "json_schema":
        raise InvalidValue.of(f"{field}.type", kind, "text, json_object or json_schema")
    holder = response_format.get("json_schema", response_format)
    holder = holder if isinstance(holder, dict) else {}
    return schema_of(holder.get("schema"), f"{field}.json_schema.schema", strict=holder.get("strict") is True)


OWN_VALUES = ("messages", "tools", "documents")
"""Values of chat templates that have fields of their own."""


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[Any, says("The conversation, oldest message first.")]
    max_completion_tokens: Annotated[int, says("By default as many tokens as the context holds.")] | None = None
    logprobs: Annotated[bool, says("Returns the log probability of each token.")] | None = None
    top_logprobs: Annotated[int, says("Most likely tokens to return, from 0 to 20; needs logprobs.")] | None = None
    response_format: Annotated[Any, says("text, json_object or json_schema.")] = None
    tools: Annotated[Any, says("Functions that the model may call.")] = None
    tool_choice: Annotated[Any, says("none, auto, required, or a function that is to be called.")] = None
    parallel_tool_calls: Annotated[bool, says("Allows several calls at once; true if not given.")] | None = None
    documents: Annotated[Any, says("vLLM: documents for the chat template.")] = None
    chat_template_kwargs: Annotated[Any, says("vLLM: further values for the chat template.")] = None
    reasoning_effort: Annotated[str, says("For the chat template; none turns thoughts off, if it can.")] | None = None
    enable_thinking: Annotated[bool, says("For the chat template: thoughts before the answer.")] | None = None
    add_generation_prompt: Annotated[bool, says("vLLM: begins an answer; true if not given.")] | None = None
    continue_final_message: Annotated[bool, says("vLLM: continues the last message.")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is not None and self.max_completion_tokens not in {None, self.max_tokens}:
            raise InvalidValue.of("max_tokens", self.max_tokens, "left out, or equal to max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidValue.of("top_logprobs", self.top_logprobs, "only with logprobs: true")

    @property
    def template_values(self) -> dict[str, Any]:
        """The values for the chat template; raises `InvalidValue`."""
        given = self.chat_template_kwargs if self.chat_template_kwargs is not None else {}
        if not isinstance(given, dict) or not given.keys().isdisjoint(OWN_VALUES):
            allowed = f"an object without {', '.join(OWN_VALUES)}"
            raise InvalidValue.of("chat_template_kwargs", given, allowed)
        names = ("reasoning_effort", "enable_thinking", "add_generation_prompt", "continue_final_message")
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidValue.of("add_generation_prompt", True, "false with continue_final_message")  # noqa: FBT003
        if self.reasoning_effort == "none":
            del values["reasoning_effort"]
            values.setdefault("enable_thinking", False)
        if self.documents is not None:
            if not isinstance(self.documents, list | tuple):
                raise InvalidValue.of("documents", self.documents, "a list of documents")
            values["documents"] = list(self.documents)
        return values | dict(given)

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, by either of its names."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[Any, says("A text, token ids, or a list of either; at most 128 prompts.")]
    echo: Annotated[bool, says("Returns the prompt before its completion.")] | None = None
    logprobs: Annotated[int, says("Also of this many most likely tokens.", ge=0)] | None = None
    best_of: Annotated[int, says("Must equal n.")] | None = None
    prompt_logprobs: Annotated[int, says("vLLM: the same of the prompt's tokens.", ge=0)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidValue.of("best_of", self.best_of, f"{self.n or 1}, which is n, or left out")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidValue.of("prompt_logprobs", self.prompt_logprobs, "left out with stream")

    @property
    def token_limit(self) -> int:
        """`max_tokens`, with OpenAI's default; 0 only with echo, which then scores the prompt."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class ModelFields(Checked, frozen=True, kw_only=True):
    """The common fields of small requests."""

    model: Annotated[str, says("Name of a loaded model.")]
    user: Annotated[str, says("Name of the end user, for the server's log.")] | None = None
    timeout: Annotated[float, says("Seconds after which the request ends with 504.", gt=0)] | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Parse a decoded body; raises as `SamplingFields.read`."""
        return cls.from_mapping({name: value for name, value in values.items() if value is not None})


class EncoderFields(ModelFields, frozen=True, kw_only=True):
    """The common fields of requests to an encoder."""

    truncate_prompt_tokens: Annotated[
        int, says("vLLM: the most tokens of a text; -1 as many as fit.", ge=-1)
    ] | None = None  # fmt: skip


class EmbeddingsRequest(EncoderFields, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    input: Annotated[Any, says("A text, token ids of the model's own vocabulary, or a list of either.")]
    encoding_format: Annotated[Literal["float", "base64"], says("As base64: little-endian float32.")] | None = None
    dimensions: Annotated[int, says("The first components to keep, at length 1.", ge=1)] | None = None


class ScoreFields(EncoderFields, frozen=True, kw_only=True):
    """POST /score: how near in meaning texts are."""

    text_1: Annotated[Any, says("A text, or as many as in text_2.")]
    text_2: Annotated[Any, says("A text or a list of texts.")]


class RerankFields(EncoderFields, frozen=True, kw_only=True):
    """POST /rerank: documents by how near in meaning they are to a text."""

    query: Annotated[str, says("A text.")]
    documents: Annotated[tuple[str, ...], says("Texts.", min_length=1)]
    top_n: Annotated[int, says("Returns only the nearest documents; 0 returns all.", ge=0)] | None = None
    return_documents: Annotated[bool, says("Returns the documents, too; true if not given.")] = True


class TokenizeFields(ModelFields, frozen=True, kw_only=True):
    """POST /tokenize: a text, or a conversation as in a chat completion."""

    prompt: Annotated[Any, says("A text.")] = None
    messages: Annotated[Any, says("The conversation, oldest message first.")] = None
    tools: Annotated[Any, says("Functions that the model may call.")] = None
    chat_template_kwargs: Annotated[Any, says("Further values for the chat template.")] = None
    add_generation_prompt: Annotated[bool, says("Begins an answer; true if not given.")] | None = None
    continue_final_message: Annotated[bool, says("Continues the last message.")] | None = None
    add_special_tokens: Annotated[bool, says("True with prompt, else false.")] | None = None
    return_token_strs: Annotated[bool, says("Returns the tokens as texts, too.")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidValue.of("prompt", "given" if self.prompt else None, "one of prompt and messages")
        if self.add_special_tokens not in {None, self.messages is None}:
            raise InvalidValue.of("add_special_tokens", self.add_special_tokens, "true with prompt, else false")


class DetokenizeFields(ModelFields, frozen=True, kw_only=True):
    """POST /detokenize: token ids."""

    tokens: Annotated[tuple[int, ...], says("Token ids.")]


class ResponseRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/responses. Conversations are kept in memory, so that a request may go on with one by its id."""

    input: Annotated[Any, says("A text, or a list of messages, function calls and their outputs.")]
    instructions: Annotated[str, says("A system message before the input.")] | None = None
    max_output_tokens: Annotated[int, says("Maximum number of tokens to generate.")] | None = None
    text: Annotated[Any, says("The format of the text: text, json_object or json_schema.")] = None
    tools: Annotated[Any, says("Functions that the model may call.")] = None
    tool_choice: Annotated[Any, says("none, auto, required, or a function that is to be called.")] = None
    parallel_tool_calls: Annotated[bool, says("Allows several calls at once; true if not given.")] | None = None
    include: Annotated[
        tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...],
        says("Thoughts are always returned."),
    ] | None = None  # fmt: skip
    previous_response_id: Annotated[str, says("The response whose conversation goes on.")] | None = None
    store: Annotated[bool, says("Keeps the conversation for later requests; true if not given.")] | None = None
    metadata: Annotated[Any, says("Returned as it is.")] = None
    reasoning: Annotated[Any, says("The effort, for the chat template.")] = None
    chat_template_kwargs: Annotated[Any, says("vLLM: further values for the chat template.")] = None
    top_logprobs: Annotated[int, says("Number of most likely tokens to return at each position.")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n not in {None, 1}:
            raise InvalidValue.of("n", self.n, "1, as a response has one completion")
        if self.max_tokens is not None:
            raise InvalidValue.of("max_tokens", self.max_tokens, "left out; use max_output_tokens instead")
        if not isinstance(self.metadata, dict | None):
            raise InvalidValue.of("metadata", self.metadata, "an object")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are to be returned."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)
