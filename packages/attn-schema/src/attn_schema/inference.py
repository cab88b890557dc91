"""The inputs and outputs of inference: prompts, tokens, completions, scores, embeddings, attention maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Annotated, Any, TypeAlias, cast

from attn_core.errors import InternalError, InvalidValue, MissingPackage
from msgspec import Meta

from attn_schema.drawing import completion_html, figure, map_html
from attn_schema.sampling import MAX_N, MAX_TOP_LOGPROBS, SamplingParams
from attn_schema.schema import MAX_INT32, Checked, Schema

MAX_EMBED_TEXTS = 1024

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Place: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT32)]
"""The number of a layer or a head."""


IMAGE_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""The placeholder character (U+FFFC) for an image in the text of a message."""


class ChatMessage(Checked, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Annotated[
        str, Meta(description='Role known to the model\'s chat template, usually "system", "user" or "assistant".')
    ]
    content: Annotated[str, Meta(description="Text of the message.")]
    images: Annotated[
        tuple[bytes, ...],
        Meta(description="Image files, for a vision-language model, inserted at the U+FFFC characters of the text, or "
        "before the text."),
    ] = ()  # fmt: skip
    extra: Annotated[
        str,
        Meta(description="JSON object with further keys of the message for the chat template, such as tool_calls or "
        "reasoning_content. A null content in it stands for that of the message."),
    ] = ""  # fmt: skip


class EncoderPrompt(Checked, frozen=True, kw_only=True):
    """The encoder input of an encoder-decoder model, such as a sentence to translate; exactly one field is given."""

    text: Annotated[str, Meta(description="Text, tokenised with the end-of-sequence token.")] | None = None
    token_ids: Annotated[tuple[TokenId, ...], Meta(description="Token ids, used as they are.")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.text is None) == (self.token_ids is None):
            raise InvalidValue.of("encoder_prompt", None if self.text is None else "both", "text or token_ids")


class Prompt(Checked, frozen=True, kw_only=True):
    """The input of a model; exactly one of text, token_ids and chat is given, or only an encoder_prompt."""

    text: Annotated[str, Meta(description="Text, tokenised with the model's special tokens.")] | None = None
    token_ids: Annotated[tuple[TokenId, ...], Meta(description="Token ids, used as they are.")] | None = None
    chat: Annotated[
        tuple[ChatMessage, ...],
        Meta(description="Messages, oldest first, rendered with the model's chat template; at least one."),
    ] | None = None  # fmt: skip
    encoder_prompt: Annotated[
        EncoderPrompt,
        Meta(description="Encoder input, for encoder-decoder models only; the other fields are then the beginning of "
        "the output."),
    ] | None = None  # fmt: skip
    chat_template_kwargs: Annotated[
        str,
        Meta(description="JSON object with further values for the chat template, such as tools, documents or "
        "enable_thinking; only with chat."),
    ] = ""  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chat_template_kwargs and self.chat is None:
            raise InvalidValue.of("chat_template_kwargs", self.chat_template_kwargs[:60], "only with chat")
        given = [name for name in ("text", "token_ids", "chat") if getattr(self, name) is not None]
        if len(given) > 1 or (not given and self.encoder_prompt is None):
            raise InvalidValue.of("prompt", given or None, "exactly one of text, token_ids and chat")

    @property
    def contents(self) -> Iterator[str]:
        """The texts of the messages."""
        return map(attrgetter("content"), self.chat or ())

    @property
    def images(self) -> Iterator[bytes]:
        """The images of the messages."""
        return chain.from_iterable(map(attrgetter("images"), self.chat or ()))

    @classmethod
    def of(cls, prompt: PromptLike, encoder_prompt: str | Sequence[int] | None = None) -> Prompt:
        """Make a prompt from text, token ids or `ChatMessage`s; raises `InvalidValue` for anything else."""
        encoder = None if encoder_prompt is None else _encoder_prompt(encoder_prompt)
        if isinstance(prompt, Prompt):
            return prompt if encoder is None else prompt.replace(encoder_prompt=encoder)
        if isinstance(prompt, str):
            return cls(text=prompt, encoder_prompt=encoder)
        items: tuple[Any, ...] = _items(prompt)
        if items and all(isinstance(item, ChatMessage) for item in items):
            return cls(chat=items, encoder_prompt=encoder)
        try:
            return cls(token_ids=items, encoder_prompt=encoder)
        except InvalidValue:
            raise InvalidValue.of("prompt", prompt, "text, token ids below 2**31, or ChatMessages") from None


PromptLike: TypeAlias = "str | Sequence[int] | Sequence[ChatMessage] | Prompt"
"""The types that are accepted in place of a `Prompt`; see `Prompt.of`."""


def _items(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Iterable) else (None,)


def _encoder_prompt(given: str | Sequence[int]) -> EncoderPrompt:
    return EncoderPrompt(text=given) if isinstance(given, str) else EncoderPrompt(token_ids=tuple(given))


class FinishReason(StrEnum):
    """The reason why a completion ended. LENGTH: `max_new_tokens` or the end of the context was reached."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"


class TopLogprob(Schema, frozen=True, kw_only=True):
    """One of the most likely tokens at a position."""

    id: Annotated[int, Meta(description="Token id.")]
    text: Annotated[str, Meta(description="The token, decoded by itself.")] = ""
    logprob: Annotated[float, Meta(description="Natural logarithm of its probability.")]
    raw: Annotated[bytes, Meta(description="Its bytes, if it is part of a character; else empty.")] = b""


class Token(Schema, frozen=True, kw_only=True):
    """A token of a prompt or completion."""

    id: Annotated[int, Meta(description="Token id.")]
    text: Annotated[str, Meta(description="The token, decoded by itself; U+FFFD for part of a character.")] = ""
    logprob: Annotated[
        float,
        Meta(
            description="Natural logarithm of its probability before any sampling option; absent if not requested, and "
            "for the first token of a sequence."
        ),
    ] | None = None  # fmt: skip
    top_logprobs: Annotated[
        tuple[TopLogprob, ...], Meta(description="The most likely tokens at this position, most likely first.")
    ] = ()
    raw: Annotated[bytes, Meta(description="Its bytes, if it is part of a character; else empty.")] = b""


class Usage(Schema, frozen=True, kw_only=True):
    """The token counts and queueing time of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens in the prompt, special tokens included.")] = 0
    cached_tokens: Annotated[
        int, Meta(description="Prompt tokens whose KV cache was reused instead of computed.")
    ] = 0  # fmt: skip
    completion_tokens: Annotated[
        int, Meta(description="Tokens generated, the end-of-sequence token included, over all completions.")
    ] = 0  # fmt: skip
    queue_time: Annotated[
        float, Meta(description="Seconds until the engine first scheduled the request; absent if it never did.")
    ] | None = None  # fmt: skip


class OutputDelta(Schema, frozen=True, kw_only=True):
    """The output of a request since the previous message of its stream.

    With `n` above 1 the deltas of several completions are interleaved; those with the same `index` belong together.
    """

    tokens: Annotated[tuple[Token, ...], Meta(description="The new tokens, in order.")] = ()
    text: Annotated[
        str,
        Meta(
            description="New text. It may lag behind `tokens` while a character is incomplete or the text could be the "
            "beginning of a stop string."
        ),
    ] = ""  # fmt: skip
    finish_reason: Annotated[
        FinishReason, Meta(description="Reason why the completion ended; on its last delta only.")
    ] | None = None  # fmt: skip
    stop_reason: Annotated[str, Meta(description="The stop string that ended it.")] | None = None
    usage: Annotated[
        Usage, Meta(description="Tokens of the whole request; on the last delta of the stream only.")
    ] | None = None  # fmt: skip
    index: Annotated[int, Meta(description="Number of the completion, from 0.")] = 0
    score: Annotated[
        float, Meta(description="Score that beam search gave the completion; on its last delta.")
    ] | None = None  # fmt: skip
    resumptions: Annotated[
        int, Meta(description="Number of times the request was resumed on another engine; on the last delta of the "
        "stream only.")
    ] = 0  # fmt: skip
    computed_on: Annotated[
        str,
        Meta(description="Device, element types and libraries of the engine; on the first delta of the stream only."),
    ] = ""  # fmt: skip
    warning: Annotated[
        str,
        Meta(
            description="Why tokens may differ from those of a request that was never resumed, such as another device; "
            "on the last delta of the stream only, and only if they may differ."
        ),
    ] | None = None  # fmt: skip


class Completion(Schema, frozen=True, kw_only=True):
    """A complete completion, joined from the deltas of a stream."""

    text: Annotated[str, Meta(description="The text.")]
    tokens: Annotated[tuple[Token, ...], Meta(description="Its tokens, in order.")]
    finish_reason: Annotated[FinishReason, Meta(description="Why it ended.")]
    stop_reason: Annotated[str, Meta(description="The stop string that ended it.")] | None = None
    usage: Annotated[Usage, Meta(description="Tokens of the whole request, over all its completions.")]
    score: Annotated[float, Meta(description="Score that beam search gave it.")] | None = None

    @classmethod
    def of(cls, deltas: Iterable[OutputDelta]) -> Completion:
        """The first completion of a stream; raises `InternalError` if it has no finish reason or no usage."""
        return cls.all_of(deltas)[0]

    @classmethod
    def all_of(cls, deltas: Iterable[OutputDelta]) -> list[Completion]:
        """Every completion of a stream, ordered by index; raises `InternalError` if one of them did not finish."""
        grouped: dict[int, list[OutputDelta]] = {}
        usage = None
        for delta in deltas:
            grouped.setdefault(delta.index, []).append(delta)
            usage = delta.usage or usage
        return [cls._joined(grouped[index], usage) for index in sorted(grouped)] or [cls._joined([], usage)]

    @classmethod
    def _joined(cls, deltas: list[OutputDelta], usage: Usage | None) -> Completion:
        last = deltas[-1] if deltas else None
        if last is None or last.finish_reason is None or usage is None:
            raise InternalError("the server ended the completion without saying why")
        return cls(
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            usage=usage,
            score=last.score,
        )

    def __repr__(self) -> str:
        return f"Completion({self.text!r}, {self._facts})"

    def _repr_html_(self) -> str:
        return completion_html(self.text, self._facts)

    @property
    def _facts(self) -> str:
        return f"{len(self.tokens)} tokens, finish_reason={self.finish_reason}"


class SequenceScore(Schema, frozen=True, kw_only=True):
    """The log probabilities of a given sequence."""

    tokens: Annotated[
        tuple[Token, ...], Meta(description="Its tokens with log probabilities; the first has none.")
    ]  # fmt: skip
    sum_logprob: Annotated[float, Meta(description="Sum of the log probabilities, in nats.")]


class Tokenization(Schema, frozen=True, kw_only=True):
    """The tokens of a prompt."""

    tokens: Annotated[tuple[Token, ...], Meta(description="The tokens, special tokens included.")]
    text: Annotated[
        str, Meta(description="The text that was tokenised, such as a conversation after the chat template.")
    ]
    unknown: Annotated[
        tuple[str, ...],
        Meta(
            description="Pieces of the text of the prompt and the encoder prompt for which the vocabulary has no token."
        ),
    ] = ()


class ElementType(StrEnum):
    """The element type of a tensor."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT32 = "int32"
    INT64 = "int64"


_FORMATS: dict[ElementType, tuple[Any, int]] = {
    ElementType.FLOAT32: ("f", 4),
    ElementType.INT32: ("i", 4),
    ElementType.INT64: ("q", 8),
}


class Tensor(Schema, frozen=True, kw_only=True):
    """A dense tensor."""

    element_type: Annotated[ElementType, Meta(description="Type of every element.")] = ElementType.FLOAT32
    shape: Annotated[tuple[int, ...], Meta(description="Size of each axis, outermost first.")]
    data: Annotated[bytes, Meta(description="Elements in row-major order, little-endian.")]

    def view(self) -> memoryview[Any]:
        """A view of the elements, without a copy: `.tolist()` gives nested lists, `numpy.asarray(...)` an array.

        Raises `InternalError` if the number of bytes does not match the shape, or if `memoryview` does not support the
        element type (float16 and bfloat16).
        """
        code, size = _FORMATS.get(self.element_type, ("", 0))
        if not code or len(self.data) != size * prod(self.shape):
            raise InternalError(f"a tensor of {self.element_type} {list(self.shape)} came with {len(self.data)} bytes")
        flat: Any = memoryview(self.data)
        shaped: memoryview[Any] = flat.cast(code, self.shape) if self.data else flat.cast(code)
        return shaped

    def numpy(self) -> Any:
        """The elements as a `numpy.ndarray` of this shape, read-only, without a copy.

        Raises `MissingPackage` without numpy, and as `view`.
        """
        try:
            import numpy as np
        except ImportError as error:
            raise MissingPackage.of("numpy", "arrays") from error
        return np.asarray(self.view()).reshape(self.shape)

    def __repr__(self) -> str:
        return f"Tensor({self.element_type}, shape={list(self.shape)})"


class AttentionMap(Schema, frozen=True, kw_only=True):
    """The attention weights of one layer."""

    layer: Annotated[int, Meta(description="Layer, from 0.")]
    mechanism: Annotated[str, Meta(description="Attention mechanism of the layer.")]
    heads: Annotated[tuple[int, ...], Meta(description="Query heads on the first axis, from 0.")]
    attention_weights: Annotated[
        Tensor, Meta(description="Weights of shape [heads, query tokens, key tokens], float32.")
    ]
    query_tokens: Annotated[
        tuple[str, ...],
        Meta(description="Text of each query token; of cross-attention, of the token generated from the query."),
    ]
    key_tokens: Annotated[tuple[str, ...], Meta(description="Text of each key token.")]
    input_gradients: Annotated[
        tuple[float, ...],
        Meta(
            description="Gradient of the next token's log probability with respect to each key token's embedding, "
            "times the embedding, in nats; only for the first layer, and only if gradients were requested."
        ),
    ] = ()
    next_token: Annotated[str, Meta(description="Text of the most likely next token, if there are gradients.")] = ""
    gradients_note: Annotated[str, Meta(description="Why requested gradients could not be computed.")] = ""
    cross_attention: Annotated[
        bool, Meta(description="Whether the keys are the tokens that the encoder reads, not the queries' own sequence.")
    ] = False

    def numpy(self) -> Any:
        """The weights as a `numpy.ndarray` [heads, query tokens, key tokens], float32; raises as `Tensor.numpy`."""
        return self.attention_weights.numpy()

    def plot(self, title: str | None = None) -> Any:
        """A `matplotlib.figure.Figure` with a heat map for each head; raises `MissingPackage` without matplotlib."""
        return figure(self, f"layer {self.layer}, {self.mechanism}" if title is None else title)

    def __repr__(self) -> str:
        sizes = f"{len(self.heads)} heads, {len(self.query_tokens)} queries, {len(self.key_tokens)} keys"
        return f"AttentionMap(layer {self.layer}, {self.mechanism}: {sizes})"

    def _repr_html_(self) -> str:
        return map_html(self)


class Embeddings(Schema, frozen=True, kw_only=True):
    """The embedding vectors of texts."""

    embeddings: Annotated[
        Tensor, Meta(description="One vector of length 1 for each text: [texts, hidden_size], float32.")
    ]
    usage: Annotated[Usage, Meta(description="Tokens of all texts.")]

    def rows(self) -> list[tuple[float, ...]]:
        """One vector for each text, as tuples of floats; raises `InternalError` unless the tensor has two axes."""
        if len(self.embeddings.shape) != 2:
            shape, size = list(self.embeddings.shape), len(self.embeddings.data)
            raise InternalError(f"vectors of shape {shape} came with {size} bytes; two axes are expected")
        return [tuple(row) for row in cast("list[list[float]]", self.embeddings.view().tolist())]


class PartialCompletion(Checked, frozen=True, kw_only=True):
    """The part of one completion that was received before its stream broke; see `Resumption`."""

    index: Annotated[int, Meta(ge=0, le=MAX_N - 1, description="Number of the completion, from 0.")] = 0
    token_ids: Annotated[tuple[TokenId, ...], Meta(description="Its tokens that were received, in order.")] = ()
    finished: Annotated[
        bool, Meta(description="Whether the completion was received to its end; it is then not sent again.")
    ] = False


class Resumption(Checked, frozen=True, kw_only=True):
    """The state from which a request continues after its stream broke."""

    received: Annotated[
        tuple[PartialCompletion, ...],
        Meta(
            min_length=1, max_length=MAX_N, description="What has been received of each completion, each at most once."
        ),
    ]
    computed_on: Annotated[str, Meta(description="The `computed_on` of the first message of the stream.")] = ""


class GenerateRequest(Checked, frozen=True, kw_only=True):
    """A request for completions of a prompt."""

    model: Annotated[str, Meta(description="Name of a loaded model.")]
    prompt: Annotated[Prompt, Meta(description="What the model reads.")]
    sampling: Annotated[SamplingParams, Meta(description="Sampling parameters.")] = SamplingParams()
    resume: Annotated[
        Resumption,
        Meta(
            description="What has been received of the same request before its stream broke: only the rest is sent. A "
            "request that samples must have the same seed as before.",
        ),
    ] | None = None  # fmt: skip


class ScoreRequest(Checked, frozen=True, kw_only=True):
    """A request for the log probabilities of given sequences."""

    model: Annotated[str, Meta(description="Name of a loaded model.")]
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1, description="The sequences to score; at least one.")]
    top_logprobs: Annotated[
        int, Meta(ge=0, le=MAX_TOP_LOGPROBS, description="Returns this many most likely tokens at each position.")
    ] = 0  # fmt: skip


class TokenizeRequest(Checked, frozen=True, kw_only=True):
    """A request for the tokens of a prompt."""

    model: Annotated[str, Meta(description="Name of a loaded model.")]
    prompt: Annotated[Prompt, Meta(description="What to tokenise.")]


class TokenIds(Checked, frozen=True, kw_only=True):
    """A text as token ids."""

    ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, description="Token ids, used as they are.")]


class EmbedRequest(Checked, frozen=True, kw_only=True):
    """A request for the embedding vectors of texts, which are given as texts or as token ids."""

    model: Annotated[str, Meta(description="Name of a loaded encoder.")]
    texts: Annotated[
        tuple[str, ...],
        Meta(
            max_length=MAX_EMBED_TEXTS,
            description="Texts, each of at least one token and at most the model's max_seq_len.",
        ),
    ] = ()  # fmt: skip
    token_ids: Annotated[
        tuple[TokenIds, ...],
        Meta(max_length=MAX_EMBED_TEXTS, description="Texts as token ids, in place of texts."),
    ] = ()
    max_tokens: Annotated[
        int, Meta(ge=1, le=MAX_INT32, description="Texts are cut to this many tokens; else those too long are refused.")
    ] | None = None  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.texts) == bool(self.token_ids):
            given = "texts and token_ids" if self.texts else "nothing"
            raise InvalidValue.of("texts", given, f"1 to {MAX_EMBED_TEXTS} texts, or else token_ids")


class AttentionMapsRequest(Checked, frozen=True, kw_only=True):
    """A request for the attention weights of a prompt."""

    model: Annotated[str, Meta(description="Name of a loaded model.")]
    prompt: Annotated[Prompt, Meta(description="What the model reads.")]
    layers: Annotated[tuple[Place, ...], Meta(description="Layers to return, from 0; all if empty.")] = ()
    heads: Annotated[tuple[Place, ...], Meta(description="Query heads to return, from 0; all if empty.")] = ()
    gradients: Annotated[
        bool, Meta(description="Also return gradients with respect to the prompt's tokens; only for decoders.")
    ] = False
