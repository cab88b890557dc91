"""Speculative decoding with a small model that proposes draft tokens for a large one.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192. They accept a
sampled token with the ratio of two probabilities; here both models sample with the same random number at each position,
and a draft token is accepted if both sample the same token. The text is then the same as without drafts, so a seed
gives the same text however many tokens there was room to draft.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from attn_core.errors import InvalidValue, WrongState
from attn_core.models import LanguageModel
from attn_core.stores import BranchingStore, StateStore
from attn_schema.engine import DRAFT_MODEL_TOKENS, MAX_SPECULATIVE_TREE_WIDTH

from attn_engine import sequence as sequences
from attn_engine.draft_tokens import TokenTree, TokenTreeBuilder
from attn_engine.model_runner import ModelRunner
from attn_engine.sampler import SamplingRow, choose_tokens
from attn_engine.scheduler import ScheduledChunk
from attn_engine.speculative import DraftRequest

log = logging.getLogger(__name__)


class DraftModel:
    """A draft model: a decoder with a KV cache of its own. Implements `Proposer`.

    A sequence for which that cache has no room, or which is longer than the draft model's context length, gets no
    draft. At most `max_num_batched_tokens` prompt tokens are computed in a step. A draft model that raises is not used
    again.
    """

    default_tokens: ClassVar[int] = DRAFT_MODEL_TOKENS

    def __init__(self, model: LanguageModel, store: StateStore, max_num_batched_tokens: int = 256) -> None:
        self._runner = ModelRunner(model, store)
        if self._runner.has_encoder:
            raise InvalidValue.of("draft_model", "an encoder-decoder model", "a decoder")
        if not isinstance(store, BranchingStore):
            raise InvalidValue.of("draft_model", type(store).__name__, "a cache that can be rolled back")
        self._store: StateStore = store
        self._branches: BranchingStore = store
        self._vocab_size = model.vocab_size
        self._max_seq_len = model.max_seq_len
        self._max_batched = max_num_batched_tokens
        self._mirrors: dict[int, sequences.Sequence] = {}
        """Copies of the sequences in the state of the draft model's store, by sequence number."""
        self._verified: dict[int, int] = {}
        """For each mirror, the number of computed tokens that are the sequence's own, not drafts."""
        self._failed = False

    def require_vocab_size(self, tokens: int) -> None:
        """Raises `InvalidValue` unless the draft model has exactly this vocabulary size."""
        if self._vocab_size != tokens:
            given = f"a vocabulary of {self._vocab_size} tokens"
            raise InvalidValue.of("draft_model", given, f"the same vocabulary as the model, of {tokens} tokens")

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int) -> list[TokenTree]:
        """See `Proposer.propose`.

        Each draft is one chain; with a `tree_width` above 1 the next most likely tokens are added as siblings of each
        token of the chain.
        """
        builders: dict[int, TokenTreeBuilder] = {}
        try:
            with torch.inference_mode():
                self._propose(requests, max_tokens, builders)
        except Exception:
            log.exception("the draft model failed and is not used again")
            self._failed = True
            return [TokenTree() for _ in requests]
        return [builders[place].tree if place in builders else TokenTree() for place in range(len(requests))]

    def forget(self, sequence: sequences.Sequence) -> None:
        """See `Proposer.forget`."""
        if self._mirrors.pop(sequence.number, None) is not None:
            self._verified.pop(sequence.number, None)
            self._store.release(sequence.number)

    def _propose(
        self, requests: Sequence[DraftRequest], max_tokens: int, builders: dict[int, TokenTreeBuilder]
    ) -> None:
        open_chains: dict[int, DraftChain] = {}
        for place, one in enumerate(requests):
            length = min(one.max_tokens, max_tokens, self._max_seq_len - len(one.sequence.tokens))
            if length > 0 and not self._failed and self._follow(one.sequence, length):
                builders[place] = TokenTreeBuilder(min(length * one.tree_width, max_tokens))
                open_chains[one.sequence.number] = DraftChain(builders[place], length, one.tree_width)
                max_tokens -= builders[place].room
        likely = self._compute_missing([self._mirrors[number] for number in open_chains])
        while likely:
            going_on = []
            for mirror, tokens in likely:
                if open_chains[mirror.number].extend(tokens):
                    mirror.tokens.append(tokens[0])
                    going_on.append(mirror)
            likely = self._compute([ScheduledChunk(mirror, 1) for mirror in going_on])

    def _follow(self, sequence: sequences.Sequence, length: int) -> bool:
        """Update the mirror of a sequence to its present tokens, rolling back rejected drafts; False without room.

        States of fixed size are rolled back to the last mark, so a few tokens after it are recomputed.
        """
        number = sequence.number
        mirror = self._mirrors.get(number)
        if mirror is None:
            if not self._store.admit(number):
                return False
            mirror = self._mirrors[number] = sequences.Sequence(sequence.request, number)
            mirror.seed = sequence.seed
        right = self._verified.get(number, 0)
        while right < min(mirror.computed, len(sequence.tokens) - 1) and mirror.tokens[right] == sequence.tokens[right]:
            right += 1
        try:
            if right < mirror.computed:
                mirror.computed = self._branches.rewind(number, right)
        except WrongState:
            self.forget(sequence)
            return self._follow(sequence, length)
        mirror.tokens = list(sequence.tokens)
        self._verified[number] = mirror.computed
        if self._store.reserve(number, len(mirror.tokens) + length):
            return True
        self.forget(sequence)
        return False

    def _compute_missing(self, mirrors: Sequence[sequences.Sequence]) -> list[tuple[sequences.Sequence, list[int]]]:
        """Compute pending tokens of the mirrors; returns those that are now complete, with their next tokens."""
        chunks: list[ScheduledChunk] = []
        left = self._max_batched
        for mirror in sorted(mirrors, key=lambda mirror: mirror.pending):
            length = min(mirror.pending, left)
            if length > 0:
                chunks.append(ScheduledChunk(mirror, length))
                left -= length
        found = self._compute(chunks)
        for mirror, _ in found:
            self._branches.mark(mirror.number, mirror.computed)
        for chunk in chunks:
            self._verified[chunk.sequence.number] = chunk.sequence.computed
        return found

    def _compute(self, chunks: Sequence[ScheduledChunk]) -> list[tuple[sequences.Sequence, list[int]]]:
        """Compute the chunks; returns, for each mirror that is then complete, its next token and the most likely ones.

        The next token is -1 if there is none.
        """
        if not chunks:
            return []
        ordered, hidden = self._runner.run(chunks)
        mirrors, rows, end = [], [], 0
        for chunk in ordered:
            end += chunk.length
            if chunk.completes:
                mirrors.append(chunk.sequence)
                rows.append(end - 1)
            chunk.sequence.computed += chunk.length
        if not mirrors:
            return []
        # Penalties and structured output are only applied in the verification.
        sampling = [SamplingRow(mirror.params, mirror.seed, len(mirror.tokens)) for mirror in mirrors]
        logits = self._runner.logits(hidden, rows)
        others = logits.topk(min(MAX_SPECULATIVE_TREE_WIDTH, self._vocab_size)).indices.tolist()
        return [
            (mirror, [token, *other])
            for mirror, token, other in zip(
                mirrors, choose_tokens(logits, sampling, self._runner.sampling), others, strict=True
            )
        ]


@dataclass
class DraftChain:
    """The draft of one sequence: a chain of `length` more tokens, with `tree_width` candidates for each."""

    builder: TokenTreeBuilder
    length: int
    tree_width: int
    end: int = -1

    def extend(self, tokens: Sequence[int]) -> bool:
        """Extend by the first of these tokens, unless it is -1, with others as siblings; whether to continue."""
        node = self.builder.add(self.end, tokens[0]) if tokens[0] >= 0 else None
        if node is None:
            return False
        beside = [token for token in tokens[1:] if token != tokens[0]]
        for token in beside[: self.tree_width - 1]:
            self.builder.add(self.end, token)
        self.end = node
        self.length -= 1
        return self.length > 0 and self.builder.room > 0
