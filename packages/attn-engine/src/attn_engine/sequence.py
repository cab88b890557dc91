"""A request on its way through the engine."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from attn_core.errors import AttnError, InternalError
from torch import Tensor

from attn_engine.detokenize import Detokenizer, StopStrings
from attn_engine.event import Finish, FinishReason, RequestUsage
from attn_engine.guide import Guide
from attn_engine.lookup import Lookup
from attn_engine.request import Request, Scoring
from attn_engine.sampling import SEED_LIMIT, Sampling


@dataclass(eq=False)
class Sequence:
    """`tokens` are the prompt and what was generated; the states of the first `computed` of them are in the store."""

    request: Request
    number: int
    """Name in the store, and order of arrival."""
    detokenizer: Detokenizer | None = None
    choice: int = 0
    """Which of the request's completions it is."""
    rank: tuple[int, int, int] = field(init=False)
    """Sorts the most urgent first: highest priority, then oldest."""
    gang: list[Sequence] = field(init=False)
    """Those with which it is in the store together, or not at all."""
    logits: Tensor | None = None
    """What comes next [vocabulary], where that waits for its gang."""
    followers: list[Sequence] = field(default_factory=list)
    """Other completions, which wait until the prompt that they share is computed."""
    tokens: list[int] = field(init=False)
    scoring: Scoring | None = field(init=False)
    """The task where tokens are scored, not generated."""
    id: str = field(init=False)
    """The request's."""
    sampling: Sampling = field(init=False)
    """The task where tokens are generated; there is none where they are scored."""
    most: int = field(init=False)
    """Tokens that it may have in all."""
    guesses: int | None = field(init=False)
    """How many tokens it wants to be guessed ahead; None leaves that to the engine."""
    computed: int = 0
    computed_in_all: int = 0
    adopted_in_all: int = 0
    """Tokens whose states were found computed."""
    entered: bool = False
    """Whether the source is in the store."""
    accepted: int = 0
    """Guessed tokens that were right."""
    lookup: Lookup = field(default_factory=Lookup)
    score: float | None = None
    """What a beam search gave it."""
    told: int = 0
    """Tokens whose scores have been told, where the task is scoring."""
    seed: int = field(init=False)
    stops: StopStrings = field(init=False)
    scope: str | None = field(init=False)
    """Whose states it shares: its request's scope and the source that they depend on; None shares nothing.

    All tokens of a sequence that is scored must be computed, so it shares nothing either.
    """
    guide: Guide | None = None
    """Follows the completion where a grammar is asked for."""
    _seen: Tensor | None = None
    _counts: Tensor | None = None

    def __post_init__(self) -> None:
        self.stand_with(self)
        self.gang = [self]
        self.tokens = list(self.request.token_ids)
        task = self.request.task
        self.id, self.most = self.request.id, len(self.tokens) + self.request.new_tokens
        self.scoring, self.guesses = (task, 0) if isinstance(task, Scoring) else (None, None)
        given: int | None = None
        stop: tuple[str, ...] = ()
        if isinstance(task, Sampling):
            self.sampling, given, stop = task, task.seed, task.stop
            self.guesses = task.guesses if task.beams is None else 0
        self.seed = random.getrandbits(64) if given is None else (given + self.choice) % SEED_LIMIT
        shares = self.request.scope is not None and self.scoring is None
        self.scope = f"{self.request.scope}\0{self.request.source_ids}" if shares else None
        self.stops = StopStrings(stop)

    def stand_with(self, other: Sequence) -> None:
        """Be as old as another sequence from now on."""
        self.rank = (-self.request.priority, other.number, self.number)

    @property
    def pending(self) -> int:
        """Tokens whose states are not computed yet: one while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - len(self.request.token_ids)

    def most_guesses(self, default: int) -> int:
        """How many tokens may be guessed ahead while it decodes: none past the last that may be generated."""
        wanted = default if self.guesses is None else self.guesses
        if not wanted or not self.generated or self.pending != 1:
            return 0
        return min(wanted, self.most - len(self.tokens) - 1)

    def text_of(self, token: int) -> str:
        """The text that is final now that this token has come."""
        return self.stops.push(self.detokenizer.push(token)) if self.detokenizer else ""

    def remaining_text(self) -> str:
        """The text that was held back, now that nothing more comes."""
        if self.detokenizer is None or self.stops.found is not None:
            return ""
        return self.stops.push(self.detokenizer.finish()) + self.stops.finish()

    def seen(self, vocabulary: int, device: torch.device) -> Tensor | None:
        """Which tokens have occurred [vocabulary], bool; None where no repetition penalty asks."""
        task = self.request.task
        if isinstance(task, Scoring) or task.repetition_penalty == 1:
            return None
        if self._seen is None:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[torch.tensor(self.tokens, device=device)] = True
        self._seen[self.tokens[-1]] = True
        return self._seen

    def counts(self, vocabulary: int, device: torch.device) -> Tensor | None:
        """How often each token was generated [vocabulary], float32; None where no penalty asks."""
        if not self.sampling.counted:
            return None
        if self._counts is None:
            made = torch.tensor(self.tokens[len(self.request.token_ids) :], dtype=torch.int64, device=device)
            self._counts = torch.bincount(made, minlength=vocabulary).float()
        elif self.generated:
            self._counts[self.tokens[-1]] += 1
        return self._counts

    def allowed(self, vocabulary: int, device: torch.device, end_ids: Collection[int]) -> Tensor | None:
        """Which tokens may come next [vocabulary], bool; None where all may."""
        if self.guide is not None:
            return self.guide.allowed(vocabulary, device)
        if self.generated >= self.sampling.min_new_tokens or not end_ids:
            return None
        allowed = torch.ones(vocabulary, dtype=torch.bool, device=device)
        allowed[torch.tensor(sorted(end_ids), device=device)] = False
        return allowed

    def follow(self, other: Sequence) -> None:
        """It has been given the states of another of the same tokens."""
        self.computed = other.computed
        self.entered = other.entered

    def forget(self) -> None:
        """Its states are gone from the store and will be computed again."""
        self.computed = 0
        self.entered = False
        self.logits = None

    def become(self, other: Sequence) -> None:
        """Hold the tokens of another from now on; nothing of them is computed."""
        self.forget()
        self.tokens = list(other.tokens)
        self.detokenizer = other.detokenizer and other.detokenizer.copy()
        self.stops = other.stops.copy()
        self.guide = other.guide and other.guide.copy()
        self._seen = self._counts = None

    def would_end(self, token: int) -> bool:
        """Whether a token that is no end token ends the text, by a stop string or as the grammar allows nothing more.

        Raises `UserError` where the grammar cannot be followed any further.
        """
        if self.detokenizer is not None and self.sampling.stop:
            stops = self.stops.copy()
            stops.push(self.detokenizer.copy().push(token))
            if stops.found is not None:
                return True
        if self.guide is None:
            return False
        guide = self.guide.copy()
        guide.follow(token)
        return guide.complete

    def follow_token(self, token: int) -> None:
        """Go on with a token whose text is told later, with all others."""
        self.tokens.append(token)
        self.logits = None
        if self.sampling.stop:
            self.text_of(token)
        if self.guide is not None:
            self.guide.follow(token)

    @property
    def usage(self) -> RequestUsage:
        """What it has cost so far."""
        return RequestUsage(
            prompt_tokens=len(self.request.token_ids),
            new_tokens=self.generated,
            computed_tokens=self.computed_in_all,
            shared_tokens=self.adopted_in_all,
        )

    def finish(self, reason: FinishReason, error: Exception | None = None) -> Finish:
        """The closing news."""
        known = error if isinstance(error, AttnError) or error is None else InternalError(str(error))
        return Finish(reason=reason, usage=self.usage, stop=self.stops.found, score=self.score, error=known)
