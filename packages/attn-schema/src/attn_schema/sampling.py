"""Parameters of generation: sampling, beam search, structured output, speculative decoding; and of scoring."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from attn_core.errors import InvalidValue
from msgspec import Meta

from attn_schema.schema import MAX_INT32, Checked

MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 64
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_N = 64
MAX_NUM_BEAMS = 64
MAX_SPECULATIVE_TOKENS = 32
MAX_GRAMMAR_CHARACTERS = 2**18
DEFAULT_MAX_NEW_TOKENS = 128


class EarlyStopping(StrEnum):
    """The stopping condition of beam search, as in Hugging Face `generate`.

    FALSE: once `num_beams` completions are finished and no running beam, scored at its present length, is better than
    the worst of them. TRUE: as soon as `num_beams` completions are finished. NEVER: as FALSE, but with a positive
    `length_penalty` a running beam is scored at the maximum length.
    """

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"


class StructuredOutput(Checked, frozen=True, kw_only=True):
    """A grammar that the completion must match; exactly one field is given. It decides where the completion ends."""

    json_schema: Annotated[
        str,
        Meta(
            min_length=1, max_length=MAX_GRAMMAR_CHARACTERS, description="JSON schema of the completion.",
            extra={"file": True},
        ),
    ] | None = None  # fmt: skip
    regex: Annotated[
        str,
        Meta(
            min_length=1, max_length=MAX_GRAMMAR_CHARACTERS,
            description="Regular expression that the whole completion matches.",
        ),
    ] | None = None  # fmt: skip
    lark: Annotated[
        str,
        Meta(
            min_length=1, max_length=MAX_GRAMMAR_CHARACTERS,
            description="Lark grammar of the completion; its first rule is `start`.", extra={"file": True},
        ),
    ] | None = None  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidValue.of("structured_output", given or None, "exactly one of json_schema, regex and lark")

    @property
    def kind(self) -> str:
        """The name of the field that is given: "json_schema", "regex" or "lark"."""
        return next(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    @property
    def grammar(self) -> str:
        """The schema, expression or grammar itself."""
        return str(getattr(self, self.kind))


class SamplingParams(Checked, frozen=True, kw_only=True):
    """How the tokens of a completion are chosen.

    Logits are processed in this order: repetition_penalty, frequency_penalty and presence_penalty, logit_bias,
    min_new_tokens, allowed_token_ids and bad_words, structured_output, temperature, top_k, top_p, min_p, typical_p.
    """

    max_new_tokens: Annotated[
        int,
        Meta(
            ge=1, le=MAX_INT32,
            description=f"Maximum number of tokens to generate; {DEFAULT_MAX_NEW_TOKENS} if not given, or what the "
            "context still holds.",
        ),
    ] | None = None  # fmt: skip
    min_new_tokens: Annotated[
        int,
        Meta(ge=0, le=MAX_INT32, description="No end-of-sequence token is generated before this many tokens."),
    ] = 0
    temperature: Annotated[
        float, Meta(ge=0, description="Divides the logits; 0 takes the most likely token (greedy decoding).")
    ] = 0.0
    top_k: Annotated[
        int, Meta(ge=0, le=MAX_INT32, description="Samples from the k most likely tokens; 0 from all.")
    ] = 0
    top_p: Annotated[
        float,
        Meta(
            gt=0, le=1,
            description="Nucleus sampling: samples from the smallest set of most likely tokens whose probabilities sum "
            "to at least this (Holtzman et al. 2020).",
        ),
    ] = 1.0  # fmt: skip
    min_p: Annotated[
        float,
        Meta(
            ge=0, le=1,
            description="Samples from tokens with at least this fraction of the most likely token's probability "
            "(Nguyen et al. 2024).",
        ),
    ] = 0.0  # fmt: skip
    typical_p: Annotated[
        float,
        Meta(
            gt=0, le=1,
            description="Locally typical sampling: samples from the smallest set of tokens, closest to the entropy "
            "first, whose probabilities sum to at least this (Meister et al. 2023).",
        ),
    ] = 1.0  # fmt: skip
    seed: Annotated[
        int, Meta(ge=0, le=2**64 - 1, description="Makes sampling reproducible; a random seed if not given.")
    ] | None = None  # fmt: skip
    repetition_penalty: Annotated[
        float,
        Meta(
            ge=0.001, le=1000,
            description="Divides positive and multiplies negative logits of tokens in prompt and completion; above 1 "
            "discourages repetition (Keskar et al. 2019).",
        ),
    ] = 1.0  # fmt: skip
    frequency_penalty: Annotated[
        float,
        Meta(ge=-2, le=2, description="Subtracted from a token's logit for each time it has been generated."),
    ] = 0.0  # fmt: skip
    presence_penalty: Annotated[
        float,
        Meta(ge=-2, le=2, description="Subtracted once from the logit of each token that has been generated."),
    ] = 0.0  # fmt: skip
    logit_bias: Annotated[
        dict[Annotated[int, Meta(ge=0, le=MAX_INT32)], Annotated[float, Meta(ge=-100, le=100)]],
        Meta(max_length=MAX_LOGIT_BIASES, description="Added to the logits of tokens, by token id; -100 to 100."),
    ] = {}  # noqa: RUF012 - msgspec copies it
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            max_length=MAX_STOP_STRINGS,
            description="The completion ends before the first of these strings, which is not returned.",
        ),
    ] = ()  # fmt: skip
    ignore_eos: Annotated[bool, Meta(description="Continues generating after end-of-sequence tokens.")] = False
    top_logprobs: Annotated[
        int,
        Meta(
            ge=0, le=MAX_TOP_LOGPROBS,
            description="Returns the log probability of each token, and those of this many most likely tokens.",
        ),
    ] | None = None  # fmt: skip
    structured_output: Annotated[
        StructuredOutput, Meta(description="Constrains the completion to a JSON schema, regular expression or grammar.")
    ] | None = None  # fmt: skip
    n: Annotated[
        int,
        Meta(
            ge=1, le=MAX_N,
            description="Number of completions of the prompt; number i has the seed `seed` + i, modulo 2^64.",
        ),
    ] = 1  # fmt: skip
    num_beams: Annotated[
        int,
        Meta(ge=1, le=MAX_NUM_BEAMS, description="Beam search with this many beams instead of sampling; 1: none."),
    ] = 1  # fmt: skip
    length_penalty: Annotated[
        float,
        Meta(
            ge=-10, le=10,
            description="With beam search: a completion scores its log probability divided by its length to this "
            "power; above 0 favours long completions.",
        ),
    ] = 1.0  # fmt: skip
    early_stopping: Annotated[EarlyStopping, Meta(description="With beam search: when to stop.")] = EarlyStopping.FALSE
    num_speculative_tokens: Annotated[
        int,
        Meta(
            ge=0, le=MAX_SPECULATIVE_TOKENS,
            description="Maximum number of draft tokens per step. Changes the speed, never the text. The model's "
            "setting if not given.",
        ),
    ] | None = None  # fmt: skip
    skip_special_tokens: Annotated[bool, Meta(description="Leaves special tokens out of the text.")] = True
    stop_token_ids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_INT32)], ...],
        Meta(
            max_length=MAX_LOGIT_BIASES,
            description="Tokens that end the completion like an end-of-sequence token, even with ignore_eos.",
        ),
    ] = ()  # fmt: skip
    allowed_token_ids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_INT32)], ...],
        Meta(description="The only tokens that may be generated; all if empty."),
    ] = ()
    bad_words: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            max_length=MAX_BAD_WORDS,
            description="Texts that are not generated: the last token of each is excluded behind the others.",
        ),
    ] = ()  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidValue.of(
                "min_new_tokens", self.min_new_tokens, f"at most {self.max_new_tokens}, max_new_tokens"
            )
        for other in OTHER_CONSTRAINTS if self.structured_output is not None else ():
            if value := getattr(self, other):
                allowed = "left out, as structured_output decides which tokens come and where the completion ends"
                raise InvalidValue.of(other, value, allowed)
        if self.num_beams > 1:
            self._check_beam_search()

    @property
    def greedy(self) -> bool:
        """Whether each token is the argmax of the model's logits, with no penalty, bias or constraint."""
        edits = (self.repetition_penalty != 1, self.frequency_penalty != 0, self.presence_penalty != 0)
        constraints = (self.logit_bias, self.structured_output, self.min_new_tokens, self.allowed_token_ids)
        return self.temperature == 0 and not any((*edits, *constraints, self.bad_words))

    def _check_beam_search(self) -> None:
        if self.n > self.num_beams:
            raise InvalidValue.of("n", self.n, f"at most {self.num_beams}, num_beams")
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed"):
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                raise InvalidValue.of(name, value, "left out with num_beams, as beam search does not sample")


class ScoringParams(Checked, frozen=True, kw_only=True):
    """The parameters for computing the log probabilities of the prompt's tokens; nothing is generated."""

    top_logprobs: Annotated[
        int,
        Meta(
            ge=0, le=MAX_TOP_LOGPROBS,
            description="Returns the log probabilities of this many most likely tokens at each position as well.",
        ),
    ] = 0  # fmt: skip


OTHER_CONSTRAINTS = ("ignore_eos", "min_new_tokens", "stop_token_ids", "allowed_token_ids", "bad_words")
"""The fields that do what a grammar does."""
_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))
