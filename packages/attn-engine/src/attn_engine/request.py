"""Requests to the engine, their outputs, and the limits of a model that requests are checked against."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.errors import AttnError, ContextLengthExceeded, InvalidValue
from attn_core.models import PromptEmbeddings, RequestAdapter
from attn_schema import OutputDelta, Resumption, SamplingParams, ScoringParams
from attn_schema.sampling import DEFAULT_MAX_NEW_TOKENS, ResolvedSamplingParams

from attn_engine.state_transfer import PromptState, prompt_digest

if TYPE_CHECKING:
    from torch import Tensor

GREEDY = SamplingParams().resolved()


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to complete (`params` are `SamplingParams`) or to score (`params` are `ScoringParams`).

    `params` are resolved without a model's recommendation, unless they are already. `token_ids` is the prompt;
    `encoder_token_ids` is the input of the encoder of an encoder-decoder model, or `encoder_features` [frames, size],
    floating point, if it takes audio; `prompt_embeddings` replaces the embeddings of some tokens, for a model that
    takes images. `deadline` is a time of `time.monotonic()`, in seconds. Requests are scheduled by `priority`, highest
    first, then by `tenant` (fair queueing, see `EngineConfig.tenant_weights`), then by deadline and arrival. `adapter`
    is applied by the model. The KV cache of equal prefixes is shared between requests of the same `scope`, such as a
    tenant's, and the same adapter; a `scope` of None shares nothing.

    `suppress_tokens` are never generated, and `begin_suppress_tokens` not as the first token; of the tokens of each of
    `bad_words` the last is not generated behind the others.

    `resume` is the part of the outputs that has already been received, from another engine that began the request: only
    the missing outputs are returned, and they are the same as without the interruption. For a prompt to score it has
    one completion, of the tokens whose log probabilities are known.

    With `prefill_only` nothing is generated: the only output has the state after all of `token_ids`. `state` is such a
    state, which another engine computed for `prefill()` of this request: its tokens are not computed again, unless it
    belongs to other tokens or to another model.
    """

    id: str
    token_ids: tuple[int, ...]
    params: SamplingParams | ScoringParams = GREEDY
    encoder_token_ids: tuple[int, ...] | None = None
    encoder_features: Tensor | None = None
    prompt_embeddings: PromptEmbeddings | None = None
    suppress_tokens: frozenset[int] = frozenset()
    begin_suppress_tokens: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    deadline: float | None = None
    priority: int = 0
    scope: str | None = ""
    tenant: str = ""
    adapter: RequestAdapter | None = None
    resume: Resumption | None = None
    prefill_only: bool = False
    state: PromptState | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if isinstance(self.params, SamplingParams) and not isinstance(self.params, ResolvedSamplingParams):
            object.__setattr__(self, "params", self.params.resolved())
        if self.encoder_token_ids is not None:
            object.__setattr__(self, "encoder_token_ids", tuple(self.encoder_token_ids))

    @property
    def encoder_input(self) -> tuple[int, ...] | Tensor | None:
        """The input of the encoder: features or tokens; None for a model without an encoder."""
        return self.encoder_token_ids if self.encoder_features is None else self.encoder_features

    @property
    def n(self) -> int:
        """The number of completions; 1 for scoring."""
        return self.params.n if isinstance(self.params, SamplingParams) else 1

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """The tokens that all unfinished completions begin with: the prompt and, if only one completion is unfinished,
        the tokens received of it."""
        left = self.open_indices
        return self.token_ids + self.received(left[0]) if len(left) == 1 else self.token_ids

    def prefill(self) -> Request:
        """The request that computes the `state` of this one: all known tokens but the last, whose logits are needed.

        Raises `InvalidValue` for scoring, which needs the logits of every token, and for fewer than two known tokens.
        """
        if isinstance(self.params, ScoringParams):
            raise InvalidValue.of("params", "scoring", "sampling; scoring needs the logits of every token")
        if len(self.known_tokens) < 2:
            raise InvalidValue.of("token_ids", "one token", "at least two, as the last one is not part of the state")
        return replace(self, token_ids=self.known_tokens[:-1], params=GREEDY, resume=None, prefill_only=True)

    def without_state(self) -> Request:
        """The same request, without the bytes of its `state`."""
        return self if self.state is None else replace(self, state=self.state.without_bytes())

    @property
    def beside_tokens(self) -> str:
        """A key for everything besides its tokens that its KV cache depends on: encoder tokens, adapter and images."""
        adapter = self.adapter.key if self.adapter is not None else ""
        images = self.prompt_embeddings.key if self.prompt_embeddings is not None else ""
        return f"{self.encoder_token_ids}\0{adapter}\0{images}"

    def state_digest(self, tokens: int) -> bytes:
        """The `PromptState.digest` of the first `tokens` tokens of this request."""
        return prompt_digest(self.known_tokens[:tokens], self.beside_tokens)

    def received(self, index: int) -> tuple[int, ...]:
        """The tokens of the completion `index` that have already been received."""
        partials = self.resume.received if self.resume else ()
        return next((partial.token_ids for partial in partials if partial.index == index), ())

    @property
    def open_indices(self) -> list[int]:
        """The indices of the completions that have not been received to their end."""
        partials = self.resume.received if self.resume else ()
        finished = {partial.index for partial in partials if partial.finished}
        return [index for index in range(self.n) if index not in finished]


class RequestOutput(NamedTuple):
    """The output of a request in one step.

    The deltas with the same `delta.index` belong to one completion, whose text is the concatenation of theirs. A
    completion ends with a `finish_reason` or an `error`; scoring ends with `FinishReason.LENGTH`. Log probabilities are
    those of the model's distribution before any sampling option. `state` is the result of a `prefill_only` request.
    """

    request_id: str
    delta: OutputDelta
    error: AttnError | None = None
    state: PromptState | None = None

    @property
    def ended(self) -> bool:
        """Whether the completion has ended."""
        return self.delta.finish_reason is not None or self.error is not None

    @property
    def last(self) -> bool:
        """Whether the request has ended, with all its completions."""
        return self.delta.usage is not None


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """The limits of a model that requests are checked against, in tokens.

    `max_encoder_len` is None for a model without an encoder. `encoder_features` is the shape of the audio features that
    an encoder takes, None if it takes tokens; `embedding_size` is the size of an element of `prompt_embeddings`, None
    for a model that takes none.
    """

    vocab_size: int
    max_seq_len: int
    max_encoder_len: int | None
    encoder_features: tuple[int, int] | None = None
    embedding_size: int | None = None

    def max_new_tokens(self, request: Request) -> int:
        """The maximum number of tokens to generate for a request; 0 for scoring and `prefill_only`."""
        if isinstance(request.params, ScoringParams) or request.prefill_only:
            return 0
        if request.params.max_new_tokens is not None:
            return request.params.max_new_tokens
        return max(1, min(DEFAULT_MAX_NEW_TOKENS, self.max_seq_len - len(request.token_ids)))

    def check(self, request: Request) -> None:
        """Raise `InvalidValue` naming the field, or `ContextLengthExceeded`, for a request that does not fit."""
        if len(request.token_ids) > self.max_seq_len:  # checked first, as checking a million ids takes long
            raise ContextLengthExceeded.of(len(request.token_ids), self.max_new_tokens(request), self.max_seq_len)
        self._check_ids("token_ids", request.token_ids)
        if isinstance(request.params, SamplingParams):
            for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
                self._check_ids(name, getattr(request.params, name), required=False)
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            self._check_ids(name, getattr(request, name), required=False)
        if self.encoder_features is None:
            self._check_encoder_ids(request.encoder_token_ids)
        self._check_encoder_features(request)
        self._check_prompt_embeddings(request)
        if request.encoder_features is not None and (request.prefill_only or request.state is not None):
            raise InvalidValue.of(
                "encoder_features", "given", "none with prefill_only or state, which audio input does not support"
            )
        new_tokens = self.max_new_tokens(request)
        if len(request.token_ids) + new_tokens > self.max_seq_len:
            raise ContextLengthExceeded.of(len(request.token_ids), new_tokens, self.max_seq_len)
        if request.resume is not None:
            self._check_resume(request, request.resume, new_tokens)

    def _check_resume(self, request: Request, resume: Resumption, new_tokens: int) -> None:
        indices = [partial.index for partial in resume.received]
        if len(set(indices)) < len(indices) or max(indices) >= request.n:
            raise InvalidValue.of(
                "resume", f"completions {indices}", f"each index at most once, from 0 to {request.n - 1}"
            )
        if not request.open_indices:
            raise InvalidValue.of("resume", "completions that have all ended", "at least one that has not")
        params = request.params
        if isinstance(params, ResolvedSamplingParams) and params.temperature > 0 and params.seed is None:
            raise InvalidValue.of("seed", None, "the seed of the original request, as it is resumed")
        for partial in resume.received:
            field, received = f"resume[{partial.index}].token_ids", len(partial.token_ids)
            self._check_ids(field, partial.token_ids, required=False)
            if partial.finished:
                continue
            if isinstance(params, SamplingParams) and params.num_beams > 1 and received:
                raise InvalidValue.of(
                    field, f"{received} tokens", "none, as beam search returns no tokens before it ends"
                )
            if isinstance(params, SamplingParams) and received >= new_tokens:
                raise InvalidValue.of(field, f"{received} tokens", f"fewer than {new_tokens}, which is max_new_tokens")
            if isinstance(params, ScoringParams) and partial.token_ids != request.token_ids[:received]:
                raise InvalidValue.of(field, "other tokens", "a prefix of the scored prompt")

    def _check_encoder_features(self, request: Request) -> None:
        name, given = "encoder_features", request.encoder_features
        shape = None if given is None else tuple(given.shape)
        if shape != self.encoder_features:
            wanted = self.encoder_features
            allowed = f"the shape {wanted}" if wanted else "none, as the model takes no audio"
            raise InvalidValue.of(name, "none" if shape is None else f"the shape {shape}", allowed)
        if self.encoder_features is not None and request.encoder_token_ids is not None:
            raise InvalidValue.of("encoder_token_ids", "tokens", "none, as the model takes audio features")

    def _check_prompt_embeddings(self, request: Request) -> None:
        given, name = request.prompt_embeddings, "prompt_embeddings"
        if given is None:
            return
        if self.embedding_size is None:
            raise InvalidValue.of(name, f"{len(given.places)} rows", "none, as the model takes no images")
        wanted, shape = (len(given.places), self.embedding_size), tuple(given.rows.shape)
        ascending = all(one < other for one, other in itertools.pairwise((-1, *given.places, len(request.token_ids))))
        if shape != wanted or not ascending:
            allowed = f"the shape {wanted}, and ascending places below {len(request.token_ids)}"
            raise InvalidValue.of(name, f"the shape {shape}", allowed)
        if given.group_around(len(request.token_ids)):
            rule = "all of its tokens, which see each other: such a prompt is not computed in two engines"
            raise InvalidValue.of("token_ids", "a part of a prompt", rule)

    def _check_encoder_ids(self, ids: tuple[int, ...] | None) -> None:
        name = "encoder_token_ids"
        if self.max_encoder_len is None:
            if ids is not None:
                raise InvalidValue.of(name, f"{len(ids)} tokens", "none, as the model has no encoder")
            return
        if ids is None:
            raise InvalidValue.of(name, None, "at least one token, as the model is an encoder-decoder model")
        self._check_ids(name, ids)
        if len(ids) > self.max_encoder_len:
            allowed = f"at most {self.max_encoder_len} tokens, the maximum length of the encoder"
            raise InvalidValue.of(name, f"{len(ids)} tokens", allowed)

    def _check_ids(self, field: str, ids: Collection[Any], *, required: bool = True) -> None:
        if required and not ids:
            raise InvalidValue.of(field, "no tokens", "at least one token")
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidValue.of(f"{field}[{i}]", token, "a whole number")
            if not 0 <= operator.index(token) < self.vocab_size:
                raise InvalidValue.of(f"{field}[{i}]", token, f"a token id from 0 to {self.vocab_size - 1}")
