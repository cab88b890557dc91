"""A sequence: the state of one completion of a request in the engine, or of a prompt that is scored."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from attn_core.errors import InternalError, InvalidValue, UserError
from attn_core.kernels.sampling import TokenCounts
from attn_schema import FinishReason, ScoringParams, Token, TopLogprob
from attn_schema.sampling import ResolvedSamplingParams
from numpy.typing import NDArray
from torch import Tensor

from attn_engine.batch_scores import BatchRow, TokenTally
from attn_engine.detokenizer import Detokenizer, StopStrings, TokenText
from attn_engine.draft_tokens import DraftLength, PromptLookup
from attn_engine.request import Request
from attn_engine.state_transfer import PromptState
from attn_engine.structured_output import GrammarMatcher

SEED_LIMIT = 2**64
NOT_FINITE = "the model's logits are not finite numbers"


class NoTokenError(InternalError):
    """No token can be chosen, as the model's logits are not finite."""

    reason = "NO_TOKEN"


@dataclass(eq=False)
class Sequence:
    """One completion: `tokens` are the prompt and the generated tokens, of which the KV cache holds the first
    `computed`."""

    request: Request
    number: int
    """Its name in the KV cache store, and its order of arrival."""
    max_new_tokens: int = 0
    detokenizer: Detokenizer | None = None
    token_text: TokenText = lambda _: ("", b"")
    index: int = 0
    """The index of the completion in its request."""
    rank: tuple[int, int, int] = field(init=False)
    """Sort key, most urgent first: highest priority, then oldest."""
    due: float = 0.0
    """The time by which it is to be completed, on the engine's clock in seconds; orders the sequences of one tenant."""
    co_scheduled: list[Sequence] = field(init=False)
    """The sequences, including itself, that must be in the KV cache together, such as the beams of a search."""
    logits: Tensor | None = None
    """The logits of the next token [vocab_size], while this beam waits for the others."""
    followers: list[Sequence] = field(default_factory=list)
    """Other completions of the request, which wait until the shared prompt is computed."""
    tokens: list[int] = field(init=False)
    scoring: ScoringParams | None = field(init=False)
    id: str = field(init=False)
    """The id of the request."""
    params: ResolvedSamplingParams = field(init=False)
    """The sampling parameters of the request; not set for scoring."""
    greedy: bool = field(init=False)
    """Whether the most likely token is always taken, independently of earlier tokens."""
    needs_logits: bool = field(init=False)
    """Whether more than the most likely token is needed from each step."""
    penalizes_counts: bool = field(init=False)
    """Whether a frequency or presence penalty is set."""
    max_len: int = field(init=False)
    """The maximum number of tokens, prompt included."""
    num_speculative_tokens: int | None = field(init=False)
    """The number of draft tokens that the request sets; None for the engine's default."""
    computed: int = 0
    cached_tokens: int = 0
    """The number of tokens whose KV cache was reused instead of computed."""
    arrival: float = field(default_factory=time.monotonic)
    """The time of submission, on the clock of `time.monotonic()`, in seconds."""
    queue_time: float | None = None
    """The seconds from arrival until it was first scheduled."""
    encoder_written: bool = False
    """Whether the encoder's states are in the KV cache."""
    accepted: int = 0
    """The number of draft tokens that were accepted."""
    score: float | None = None
    """The score of the hypothesis; only set by beam search."""
    scores_returned: int = 0
    """For scoring, the number of tokens whose log probabilities have been returned."""
    seed: int = field(init=False)
    stops: StopStrings = field(init=False)
    scope: str | None = field(init=False)
    """The key within which prefixes are shared: the request's scope, encoder tokens, adapter and images.

    None shares nothing, as for scoring, in which every token must be computed.
    """
    matcher: GrammarMatcher | None = None
    _token_counts: TokenCounts | None = None
    _counted: int = 0
    """Tokens that these counts include."""
    _tallies: tuple[TokenTally, TokenTally] | None = None

    def __post_init__(self) -> None:
        self.rank_with(self)
        self.co_scheduled = [self]
        self.tokens = list(self.request.token_ids)
        params = self.request.params
        self.id, self.max_len = self.request.id, len(self.tokens) + self.max_new_tokens
        self.scoring, self.num_speculative_tokens = (params, 0) if isinstance(params, ScoringParams) else (None, None)
        self.greedy, self.needs_logits, self.penalizes_counts = False, True, False
        seed: int | None = None
        stop: tuple[str, ...] = ()
        if isinstance(params, ResolvedSamplingParams):
            self.params, seed, stop = params, params.seed, params.stop
            self.greedy = params.greedy and not (self.request.suppress_tokens | self.request.begin_suppress_tokens)
            self.needs_logits = not self.greedy or params.top_logprobs is not None or params.num_beams > 1
            self.penalizes_counts = params.frequency_penalty != 0 or params.presence_penalty != 0
            self.num_speculative_tokens = params.num_speculative_tokens if params.num_beams == 1 else 0
        self.seed = random.getrandbits(64) if seed is None else (seed + self.index) % SEED_LIMIT
        has_audio = self.request.encoder_features is not None  # audio inputs are not compared, so they share nothing
        shares = self.request.scope is not None and self.scoring is None and not has_audio
        self.scope = f"{self.request.scope}\0{self.request.beside_tokens}" if shares else None
        self.stops = StopStrings(stop)

    @cached_property
    def lookup(self) -> PromptLookup:
        """Its n-grams, for prompt lookup."""
        return PromptLookup()

    @cached_property
    def draft_length(self) -> DraftLength:
        """How many draft tokens pay for it, if no number is set."""
        return DraftLength()

    def rank_with(self, other: Sequence) -> None:
        """Take the age of another sequence for the order of urgency."""
        self.rank = (-self.request.priority, other.number, self.number)

    @property
    def pending(self) -> int:
        """The number of tokens that are still to be computed; 1 in decode."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """The number of tokens generated so far."""
        return len(self.tokens) - len(self.request.token_ids)

    def wanted_draft_tokens(self, default: int) -> int:
        """The number of draft tokens that its request sets, or the engine's `default`."""
        return default if self.num_speculative_tokens is None else self.num_speculative_tokens

    def max_draft_tokens(self, default: int) -> int:
        """The number of draft tokens that may be verified in the next step; 0 outside decode.

        Draft tokens never extend beyond the last token that may be generated.
        """
        wanted = self.wanted_draft_tokens(default)
        if not wanted or not self.generated or self.pending != 1:
            return 0
        return min(wanted, self.max_len - len(self.tokens) - 1)

    def resume_after(self, received: Collection[int], end_ids: Collection[int]) -> None:
        """Continue after tokens that another engine generated, restoring the state of text, stop strings and grammar.

        Raises `InvalidValue` if the completion ends within these tokens, or structured output does not allow them.
        """
        for place, token in enumerate(received):
            field = f"resume[{self.index}].token_ids[{place}]"
            self.tokens.append(token)
            self.text_of(token)
            if self.matcher is not None:
                try:
                    self.matcher.accept_checked(token)
                except UserError as error:
                    raise InvalidValue.of(field, token, "a token that structured_output allows") from error
            if (
                self.ends(token, end_ids)
                or self.stops.found is not None
                or (self.matcher is not None and self.matcher.complete)
            ):
                raise InvalidValue.of(
                    field, token, "a token that does not end the completion, unless it is marked as finished"
                )

    def token(self, id: int, logprob: float | None = None, top: Collection[tuple[int, float]] = ()) -> Token:  # noqa: A002
        """The `Token` with its text; `top` are the most likely (id, logprob) at its position."""
        text, raw = self.token_text(id)
        if not top:
            return Token(id=id, text=text, raw=raw, logprob=logprob)
        spelled = [(i, *self.token_text(i), value) for i, value in top]
        others = tuple(TopLogprob(id=i, text=said, raw=part, logprob=value) for i, said, part, value in spelled)
        return Token(id=id, text=text, raw=raw, logprob=logprob, top_logprobs=others)

    def text_of(self, token: int) -> str:
        """Process the next token; returns the text that becomes final with it."""
        return self.stops.push(self.detokenizer.push(token)) if self.detokenizer else ""

    def remaining_text(self) -> str:
        """The text that was held back, at the end of the completion."""
        if self.detokenizer is None or self.stops.found is not None:
            return ""
        return self.stops.push(self.detokenizer.finish()) + self.stops.finish()

    def ends(self, token: int, end_ids: Collection[int]) -> bool:
        """Whether a token ends the completion, and is no part of its text."""
        return token in self.params.stop_token_ids or (token in end_ids and not self.params.ignore_eos)

    def token_counts(self) -> TokenCounts | None:
        """The distinct tokens of the sequence and how often each was generated; None without penalties."""
        if not self.penalizes_counts and self.params.repetition_penalty == 1:
            return None
        if self._token_counts is None:
            self._counted = len(self.request.token_ids)
            self._token_counts = TokenCounts(self.tokens[: self._counted])
        self._token_counts.extend(self.tokens[self._counted :])
        self._counted = len(self.tokens)
        return self._token_counts

    def allowed(self, vocab_size: int, device: torch.device, end_ids: Collection[int]) -> Tensor | None:
        """Which tokens may come next [vocab_size], bool; None if all may."""
        allowed = None if self.matcher is None else self.matcher.allowed(vocab_size, device)
        if self.params.allowed_token_ids:
            allowed = torch.as_tensor(self._grammar(vocab_size), device=device).bool()
        suppressed = self.suppressed(end_ids)
        if not suppressed:
            return allowed
        allowed = torch.ones(vocab_size, dtype=torch.bool, device=device) if allowed is None else allowed
        allowed[torch.tensor(sorted(suppressed), device=device)] = False
        return allowed

    def suppressed(self, end_ids: Collection[int], ahead: int = 0) -> Collection[int]:
        """The tokens that may not come next, or `ahead` tokens later, apart from structured output."""
        suppressed, generated = set(self.request.suppress_tokens), self.generated + ahead
        if not generated:
            suppressed |= self.request.begin_suppress_tokens
        if generated < self.params.min_new_tokens:
            suppressed.update(end_ids, self.params.stop_token_ids)
        begin = len(self.request.token_ids)
        for *before, last in self.request.bad_words:
            if not before or self.tokens[max(begin, len(self.tokens) - len(before)) :] == before:
                suppressed.add(last)
        return suppressed

    def _grammar(self, vocab_size: int) -> NDArray[Any] | None:
        """The tokens that `allowed_token_ids` or the grammar allows [vocab_size], uint8, not 0; None for all."""
        if not self.params.allowed_token_ids:
            return None if self.matcher is None else self.matcher.allowed_bytes(vocab_size)
        only = np.zeros(vocab_size, np.uint8)
        only[list(self.params.allowed_token_ids)] = 1
        return only

    def batch_row(self, vocab_size: int, end_ids: Collection[int], *, after: int | None = None) -> BatchRow:
        """The row from which `batch_sampler` chooses its next token on a GPU.

        With `after`, its previous token is only known to the device: it is at this index of the previous step's tokens.
        """
        ahead = int(after is not None)
        position = len(self.tokens) + ahead
        if self.greedy:
            return BatchRow(self.params, self.seed, position, self.tokens, greedy=True)
        if self._tallies is None:
            self._tallies = TokenTally(), TokenTally(noted=len(self.request.token_ids))
        seen, counts = self._tallies
        return BatchRow(
            self.params,
            self.seed,
            position,
            self.tokens,
            seen=seen if self.params.repetition_penalty != 1 else None,
            counts=counts if self.penalizes_counts else None,
            suppressed=self.suppressed(end_ids, ahead),
            grammar=self._grammar(vocab_size),
            after=after,
        )

    def undo_last_token(self) -> None:
        """Undo the computation of its last token, whose input token was wrong."""
        self.computed -= 1
        self._tallies = None

    def took_states_of(self, other: Sequence) -> None:
        """Update its state after its KV cache was forked from that of another sequence with the same tokens."""
        self.computed = other.computed
        self.encoder_written = other.encoder_written

    def lost_states(self) -> None:
        """Update its state after its KV cache was freed, so that its tokens are recomputed."""
        self.computed = 0
        self.encoder_written = False
        self.logits = None
        self._tallies = None  # they are views of a batch's memory, which a waiting sequence would keep alive

    def become(self, other: Sequence) -> None:
        """Copy the tokens and text state of another sequence; none of the tokens counts as computed."""
        self.lost_states()
        self.tokens = list(other.tokens)
        self.detokenizer = other.detokenizer and other.detokenizer.copy()
        self.stops = other.stops.copy()
        self.matcher = other.matcher and other.matcher.copy()
        self._token_counts = None

    def would_end(self, token: int) -> bool:
        """Whether a token ends the text by a stop string, or because the grammar is complete.

        Raises `UserError` if structured output cannot be matched any further.
        """
        if self.detokenizer is not None and self.params.stop:
            stops = self.stops.copy()
            stops.push(self.detokenizer.copy().push(token))
            if stops.found is not None:
                return True
        if self.matcher is None:
            return False
        matcher = self.matcher.copy()
        matcher.accept_checked(token)
        return matcher.complete

    def append_beam_token(self, token: int) -> None:
        """Append a token to a beam, whose text is only returned at the end of the search."""
        self.tokens.append(token)
        self.logits = None
        if self.params.stop:
            self.text_of(token)
        if self.matcher is not None:
            self.matcher.accept_checked(token)


class SequenceOutput(NamedTuple):
    """The output of a step for one sequence; a `finish_reason` or an `error` ends it."""

    sequence: Sequence
    tokens: tuple[Token, ...]
    text: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    state: PromptState | None = None

    @property
    def ended(self) -> bool:
        """Whether the sequence ends."""
        return self.finish_reason is not None or self.error is not None

    def then(self, later: SequenceOutput) -> SequenceOutput:
        """Concatenate this output and a later one of the same sequence."""
        tokens, text = self.tokens + later.tokens, self.text + later.text
        return SequenceOutput(self.sequence, tokens, text, later.finish_reason, later.error)
