"""The scheduler: decides which sequences compute how many tokens in the next step.

Tenants of equal priority are served by virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language
Models", arXiv 2401.00588).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from attn_core.stores import BranchingStore, StateStore, TreeStore
from attn_schema import EngineConfig

from attn_engine.draft_tokens import NO_DRAFT, TokenTree
from attn_engine.kv_reuse import KVOffload, PrefixCaching
from attn_engine.sequence import Sequence
from attn_engine.speculative import DraftRequest, Proposer

_rank = attrgetter("rank")
Sequences: TypeAlias = Collection[Sequence]
_Place: TypeAlias = tuple[int, float, int, int, Sequence]
"""(negative priority, due, order, number, sequence) of a waiting sequence; numbers are unique, so sequences are never
compared."""


class VirtualTokenCounter:
    """The number of tokens served to each tenant, divided by its weight, which is 1 for tenants not in `weights`.

    A tenant that was idle restarts with at least the counter of the least served active tenant, so that no tenant
    accumulates credit while idle.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._served: dict[str, float] = {}

    def update_active(self, active: Iterable[str]) -> None:
        """Update which tenants have work. An idle tenant's counter is kept while it exceeds that of an active one."""
        now = set(active)
        least = min((self._served[tenant] for tenant in now if tenant in self._served), default=0.0)
        kept = {tenant: served for tenant, served in self._served.items() if tenant in now or served > least}
        self._served = kept | {tenant: max(kept.get(tenant, least), least) for tenant in now}

    def charge(self, tenant: str, tokens: int) -> None:
        """Add tokens to the counter of a tenant."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """The counter of a tenant; only differences between counters are meaningful."""
        return self._served.get(tenant, 0.0)


class ScheduledChunk(NamedTuple):
    """The next `length` tokens of a sequence to compute, and the draft tokens to verify after them."""

    sequence: Sequence
    length: int
    draft: TokenTree = NO_DRAFT
    accepted_before: int = 0
    """The number of draft tokens of the sequence that were accepted before this step."""

    @property
    def start(self) -> int:
        """The position of its first token, as long as the chunk is not marked as computed."""
        return self.sequence.computed

    @property
    def rows(self) -> int:
        """The number of tokens to compute, including draft tokens."""
        return self.length + len(self.draft.tokens)

    @property
    def completes(self) -> bool:
        """Whether the chunk computes all pending tokens, so that the next token can be chosen."""
        return self.length == self.sequence.pending


class Scheduler:
    """Waiting and running sequences, and the store that holds the KV cache of the running ones.

    Decoding sequences are scheduled first, one token each; the rest of `max_num_batched_tokens` is given to prompts, in
    chunks. When memory runs out, the least urgent running sequence is preempted: it waits to be recomputed, or reloaded
    if it was offloaded. The most urgent sequence can always continue, as it was checked to fit alone, so sequences
    cannot deadlock.
    """

    def __init__(self, store: StateStore, config: EngineConfig, proposer: Proposer) -> None:
        self._store = store
        self._proposer = proposer
        self._branches = store if isinstance(store, BranchingStore) else None
        self._max_num_seqs, self._max_batched = config.batch_sizes
        self._num_speculative_tokens = config.num_speculative_tokens or 0
        trees = isinstance(store, TreeStore) and store.tree_unsupported_reason() is None
        self._tree_width = config.speculative_tree_width if trees else 1
        self.prefixes = PrefixCaching(store)
        self.offload = KVOffload(store, config.kv_offload_bytes)
        self.fairness = VirtualTokenCounter(config.tenant_weights)
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.preemptions = 0
        self.cached_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting[sequence.number] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its resources."""
        self.offload.drop(sequence)
        self._proposer.forget(sequence)
        if sequence.number in self.running:
            del self.running[sequence.number]
            self._store.release(sequence.number)
        else:
            self.waiting.pop(sequence.number, None)
        # Break the reference cycle: the list contains the sequence itself, which would keep its request alive.
        sequence.co_scheduled = []

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Fork the KV cache for the followers of a sequence; returns those forked. The others compute the prompt."""
        forked = []
        for follower in sequence.followers:
            if self._branches and self._branches.fork(sequence.number, follower.number, sequence.computed):
                follower.took_states_of(sequence)
                follower.cached_tokens += sequence.computed
                self.running[follower.number] = follower
                self.cached_tokens += sequence.computed
                forked.append(follower)
            else:
                self.add(follower)
        sequence.followers = []
        return forked

    def branch(self, parent: Sequence, copy: Sequence) -> None:
        """Fork the KV cache of a beam, preempting less urgent sequences; without room the copy waits with all beams."""
        while parent.number in self.running:
            if self._branches and self._branches.fork(parent.number, copy.number, parent.computed):
                copy.took_states_of(parent)
                self.running[copy.number] = copy
                self.cached_tokens += parent.computed
                return
            self._preempt(max(self.running.values(), key=_rank))
        self.add(copy)

    def drop_states(self, sequence: Sequence) -> None:
        """Send a sequence, and those co-scheduled with it, back to waiting, to be recomputed."""
        for member in sequence.co_scheduled:
            self.offload.drop(member)
        self._back_to_waiting(sequence)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the KV cache of a sequence is in the store."""
        return sequence.number in self.running

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step: reserves their room, preempts and admits; the rest is used for draft tokens."""
        chunks = self._schedule()
        left = self._max_batched - sum(chunk.length for chunk in chunks)
        if left > 0 and self._branches is not None:
            places, wanted = [], []
            for place, chunk in enumerate(chunks):
                max_tokens = self._max_draft_tokens(chunk.sequence, left)
                if max_tokens > 0:
                    places.append(place)
                    wanted.append(DraftRequest(chunk.sequence, max_tokens, self._tree_width))
            drafts = self._proposer.propose(wanted, left) if wanted else []
            for place, draft in zip(places, drafts, strict=True):
                chunks[place] = self._with_draft(chunks[place], draft, self._branches)
        return chunks

    def drafts(self, sequence: Sequence) -> bool:
        """Whether a sequence may be given draft tokens."""
        return self._branches is not None and sequence.wanted_draft_tokens(self._num_speculative_tokens) > 0

    def continue_ahead(self, sequences: Sequences) -> bool:
        """Reserve room for one more token of each of these running sequences, which have none pending.

        False if that would need a preemption, or if a waiting sequence could be admitted.
        """
        if self.waiting and len(self.running) < self._max_num_seqs:
            return False
        if not all(self._store.reserve(one.number, one.computed + 1) for one in sequences):
            return False
        self._charge(sequences)
        return True

    def _charge(self, sequences: Sequences) -> None:
        """Charge one token of each sequence to its tenant."""
        for tenant, tokens in Counter(sequence.request.tenant for sequence in sequences).items():
            self.fairness.charge(tenant, tokens)

    def _max_draft_tokens(self, sequence: Sequence, left: int) -> int:
        count = min(left, sequence.max_draft_tokens(self._num_speculative_tokens))
        return self.prefixes.chunk(sequence, 1 + count) - 1 if count > 0 else 0

    def _with_draft(self, chunk: ScheduledChunk, draft: TokenTree, store: BranchingStore) -> ScheduledChunk:
        """The chunk with these draft tokens, if there is room for them without preemption; else without them."""
        sequence = chunk.sequence
        if not draft or not self._store.reserve(sequence.number, sequence.computed + 1 + len(draft)):
            return chunk
        store.mark(sequence.number, sequence.computed)
        return ScheduledChunk(sequence, 1, draft, sequence.accepted)

    def _schedule(self) -> list[ScheduledChunk]:
        preemptions = self.preemptions
        running = sorted(self.running.values(), key=_rank)
        chunks = self._continue([s for s in running if s.pending == 1], self._max_batched)
        self._charge([chunk.sequence for chunk in chunks])
        left = self._max_batched - len(chunks)
        chunks += self._continue([s for s in running if s.pending > 1], left)
        left = self._max_batched - sum(chunk.length for chunk in chunks)
        # After a preemption nothing is admitted: it would only be preempted again in the next step.
        if self.preemptions == preemptions:
            chunks += self._admit(left)
            return chunks
        return [chunk for chunk in chunks if chunk.sequence.number in self.running]

    def _continue(self, sequences: Iterable[Sequence], left: int) -> list[ScheduledChunk]:
        chunks = []
        for sequence in sequences:
            length = min(sequence.pending, left)
            if length < 1 or sequence.number not in self.running:
                continue
            if sequence.pending > 1:
                length = self.prefixes.chunk(sequence, length)
            if self._make_room(sequence, sequence.computed + length):
                chunks.append(ScheduledChunk(sequence, length))
                left -= length
        return chunks

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve room for `tokens` tokens, preempting less urgent sequences; False if it was preempted itself."""
        while not self._store.reserve(sequence.number, tokens):
            self._preempt(max(self.running.values(), key=_rank))
            if sequence.number not in self.running:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        for sequence in victim.co_scheduled:
            if sequence.number in self.running:
                self.offload.save(sequence)
        self._back_to_waiting(victim)

    def _back_to_waiting(self, victim: Sequence) -> None:
        for sequence in victim.co_scheduled:
            if self.running.pop(sequence.number, None):
                self._store.release(sequence.number)
                self._proposer.forget(sequence)
                sequence.lost_states()
                sequence.due = -inf  # first of its tenant, as it has already used computation
                self.add(sequence)
        self.preemptions += 1

    def _admit(self, left: int) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        queues = self._queues() if left > 0 else {}
        while left > 0 and (first := self._next(queues)) is not None:
            group = sorted((member for member in first.co_scheduled if member.number in self.waiting), key=_rank)
            if not self._enter(group):
                break
            for sequence in group:
                del self.waiting[sequence.number]
                self.running[sequence.number] = sequence
                if sequence.queue_time is None:
                    sequence.queue_time = time.monotonic() - sequence.arrival
                sequence.cached_tokens += sequence.computed
                self.cached_tokens += sequence.computed
                self.offload.reload(sequence, _room(sequence))
                self.fairness.charge(sequence.request.tenant, sequence.pending)
                length = self.prefixes.chunk(sequence, min(sequence.pending, left)) if left > 0 else 0
                if length > 0:
                    chunks.append(ScheduledChunk(sequence, length))
                    left -= length
        return chunks

    def _queues(self) -> dict[str, list[_Place]]:
        """The waiting sequences of each tenant as heaps, ordered by priority, then by deadline, then by age.

        Thousands may wait while few are admitted: each is visited once per step, however many are admitted.
        """
        queues: dict[str, list[_Place]] = {}
        for sequence in self.waiting.values():
            urgency, order, number = sequence.rank
            queues.setdefault(sequence.request.tenant, []).append((urgency, sequence.due, order, number, sequence))
        for queue in queues.values():
            heapq.heapify(queue)
        if queues:
            self.fairness.update_active({*queues, *[s.request.tenant for s in self.running.values()]})
        return queues

    def _next(self, queues: dict[str, list[_Place]]) -> Sequence | None:
        """The sequence to admit next: of the least served tenant among those with a sequence of the highest priority.

        Preemption, in contrast, is not by tenant but by priority and age, or two tenants would preempt each other.
        """
        for tenant, queue in list(queues.items()):
            while queue and queue[0][3] not in self.waiting:  # admitted with others of its request
                heapq.heappop(queue)
            if not queue:
                del queues[tenant]
        if not queues:
            return None
        # By priority, then by how much the tenant was served, then by deadline, then by age.
        first = min(
            queues, key=lambda tenant: (queues[tenant][0][0], self.fairness.served(tenant), *queues[tenant][0][1:4])
        )
        return heapq.heappop(queues[first])[4]

    def _enter(self, group: list[Sequence]) -> bool:
        """Admit either all sequences of the group to the store, or none."""
        for place, sequence in enumerate(group):
            if self._enter_one(sequence):
                continue
            for entered in group[:place]:
                self._store.release(entered.number)
                entered.lost_states()
            return False
        return True

    def _enter_one(self, sequence: Sequence) -> bool:
        if not self._store.admit(sequence.number):
            return False
        if not self.offload.holds(sequence):
            self.prefixes.adopt(sequence)
        if self._store.reserve(sequence.number, _room(sequence)):
            return True
        self._store.release(sequence.number)
        sequence.lost_states()
        return False


def _room(sequence: Sequence) -> int:
    """The tokens to reserve at admission: all known ones and, for generation, one more, so that the sequence is not
    preempted before it has generated a token."""
    return len(sequence.tokens) + (sequence.scoring is None and not sequence.request.prefill_only)
