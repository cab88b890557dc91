"""Parameters of generation: sampling, beam search, structured output, speculative decoding; and of scoring."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any

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


Temperature = Annotated[
    float,
    Meta(
        ge=0,
        description="Divides the logits; 0 takes the most likely token (greedy decoding). If neither given nor "
        "recommended by the model: 1 with n, top_k, top_p, min_p or typical_p, else 0.",
    ),
]
TopK = Annotated[int, Meta(ge=0, le=MAX_INT32, description="Samples from the k most likely tokens; 0 from all.")]
TopP = Annotated[
    float,
    Meta(
        gt=0, le=1,
        description="Nucleus sampling: samples from the smallest set of most likely tokens whose probabilities sum to "
        "at least this (Holtzman et al. 2020).",
    ),
]  # fmt: skip
MinP = Annotated[
    float,
    Meta(
        ge=0, le=1,
        description="Samples from tokens with at least this fraction of the most likely token's probability (Nguyen et "
        "al. 2024).",
    ),
]  # fmt: skip
TypicalP = Annotated[
    float,
    Meta(
        gt=0, le=1,
        description="Locally typical sampling: samples from the smallest set of tokens, closest to the entropy first, "
        "whose probabilities sum to at least this (Meister et al. 2023).",
    ),
]  # fmt: skip
RepetitionPenalty = Annotated[
    float,
    Meta(
        ge=0.001, le=1000,
        description="Divides positive and multiplies negative logits of tokens in prompt and completion; above 1 "
        "discourages repetition (Keskar et al. 2019).",
    ),
]  # fmt: skip


class SamplingParams(Checked, frozen=True, kw_only=True):
    """How the tokens of a completion are chosen.

    Of temperature, top_k, top_p, min_p, typical_p and repetition_penalty, those that are not given are as the model's
    generation_config.json recommends; without a recommendation they change nothing.

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
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    typical_p: TypicalP | None = None
    seed: Annotated[
        int, Meta(ge=0, le=2**64 - 1, description="Makes sampling reproducible; a random seed if not given.")
    ] | None = None  # fmt: skip
    repetition_penalty: RepetitionPenalty | None = None
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

    @classmethod
    def recommended(cls, config: Mapping[str, Any]) -> dict[str, float]:
        """What a generation_config.json recommends, by name: a penalty and, only with `do_sample`, as in transformers,
        sampling.

        Raises `InvalidValue` for values that are not allowed.
        """
        names = RECOMMENDED if config.get("do_sample") is True else ("repetition_penalty",)
        given = {name: value for name in names if (value := config.get(name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        found = {"temperature": 1.0} | given if len(names) > 1 else given
        cls(**found)
        return found

    def resolved(self, recommended: Mapping[str, float] = MappingProxyType({})) -> ResolvedSamplingParams:
        """The same with every such field given: those that are not are as recommended, else change nothing.

        Beam search does not sample, and follows only the recommended penalty.
        """
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        beams = self.num_beams > 1
        wished = {name: value for name, value in recommended.items() if not beams or name == "repetition_penalty"}
        if "top_k" in wished:
            wished["top_k"] = int(wished["top_k"])
        asks = self.n > 1 or any(given[name] not in (None, NEUTRAL[name]) for name in FILTERS)
        drawn = {"temperature": 1.0} if asks and not beams else {}
        filled = {name: default for name, default in (NEUTRAL | drawn | wished).items() if given[name] is None}
        return ResolvedSamplingParams(**given | filled)

    def _check_beam_search(self) -> None:
        if self.n > self.num_beams:
            raise InvalidValue.of("n", self.n, f"at most {self.num_beams}, num_beams")
        for name in ("temperature", *FILTERS, "seed"):
            value = getattr(self, name)
            if value not in (None, NEUTRAL.get(name)):
                raise InvalidValue.of(name, value, "left out with num_beams, as beam search does not sample")


class ResolvedSamplingParams(SamplingParams, frozen=True, kw_only=True):
    """Sampling parameters of which every field is given that a model may recommend."""

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    typical_p: TypicalP = 1.0
    repetition_penalty: RepetitionPenalty = 1.0

    @property
    def greedy(self) -> bool:
        """Whether each token is the argmax of the model's logits, with no penalty, bias or constraint."""
        edits = (self.repetition_penalty != 1, self.frequency_penalty != 0, self.presence_penalty != 0)
        constraints = (self.logit_bias, self.structured_output, self.min_new_tokens, self.allowed_token_ids)
        return self.temperature == 0 and not any((*edits, *constraints, self.bad_words))


FILTERS = ("top_k", "top_p", "min_p", "typical_p")
"""The fields that choose from which tokens is drawn."""
RECOMMENDED = ("temperature", *FILTERS, "repetition_penalty")
"""The fields that a model's generation_config.json may recommend."""
NEUTRAL: dict[str, float] = {
    name: default
    for name, default in zip(
        ResolvedSamplingParams.__struct_fields__, ResolvedSamplingParams.__struct_defaults__, strict=True
    )
    if name in RECOMMENDED
}
"""Their values that change nothing."""


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
