"""Who computes how many tokens in the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from attn_core.stores import BranchingStore, StateStore, TreeStore

from attn_engine.limits import EngineLimits
from attn_engine.offload import Offload
from attn_engine.prefixes import Prefixes
from attn_engine.proposer import Proposer, Wanted
from attn_engine.sequence import Sequence
from attn_engine.shares import Shares
from attn_engine.token_tree import NOTHING, TokenTree

_rank = attrgetter("rank")


class Chunk(NamedTuple):
    """The next `length` tokens of a sequence, and tokens that are guessed to follow."""

    sequence: Sequence
    length: int
    guess: TokenTree = NOTHING
    accepted_before: int = 0

    @property
    def start(self) -> int:
        """The position of its first token, as long as it is not computed."""
        return self.sequence.computed

    @property
    def rows(self) -> int:
        """Tokens to compute."""
        return self.length + len(self.guess.tokens)

    @property
    def completes(self) -> bool:
        """Whether nothing is left to compute afterwards, so that a token can be chosen."""
        return self.length == self.sequence.pending


class Scheduler:
    """Waiting and running sequences, and the store they share.

    Running sequences decode first, one token each; what is left of the step's tokens goes to prompts in chunks. When
    memory runs out, the least urgent running sequence leaves the store and waits to be computed again, or reloaded
    where its states could be kept: the most urgent can always go on, as it was checked to fit alone, so two half-grown
    sequences cannot block each other.
    """

    def __init__(self, store: StateStore, limits: EngineLimits, proposer: Proposer) -> None:
        self._store = store
        self._proposer = proposer
        self._branches = store if isinstance(store, BranchingStore) else None
        self._step_tokens = limits.step_tokens
        self._guesses = limits.guesses
        trees = isinstance(store, TreeStore) and store.tree_unsupported_reason() is None
        self._branching = limits.branches if trees else 1
        self.prefixes = Prefixes(store)
        self.offload = Offload(store, limits.offload_bytes)
        self.shares = Shares(limits.shares)
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self.preemptions = 0
        self.shared_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Let it wait for a place."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out, wherever it is, and free what it holds at once."""
        self.offload.drop(sequence)
        self._proposer.forget(sequence)
        if sequence.number in self.running:
            del self.running[sequence.number]
            self._store.release(sequence.number)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Let its followers go on from where it is; those for which there is no room compute the prompt themselves."""
        forked = []
        for follower in sequence.followers:
            if self._branches and self._branches.fork(sequence.number, follower.number, sequence.computed):
                follower.follow(sequence)
                follower.adopted_in_all += sequence.computed
                self.running[follower.number] = follower
                self.shared_tokens += sequence.computed
                forked.append(follower)
            else:
                self.add(follower)
        sequence.followers = []
        return forked

    def branch(self, parent: Sequence, copy: Sequence) -> None:
        """Give a copy of a sequence its states, at the expense of less urgent ones; else it waits with its gang."""
        while parent.number in self.running:
            if self._branches and self._branches.fork(parent.number, copy.number, parent.computed):
                copy.follow(parent)
                self.running[copy.number] = copy
                self.shared_tokens += parent.computed
                return
            self._preempt(max(self.running.values(), key=_rank))
        self.add(copy)

    def drop_states(self, sequence: Sequence) -> None:
        """Let a sequence, with its gang, wait to be computed again from its beginning."""
        for member in sequence.gang:
            self.offload.drop(member)
        self._leave(sequence)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the states of a sequence are in the store."""
        return sequence.number in self.running

    def plan(self) -> list[Chunk]:
        """The chunks of the next step; reserves their room, preempts and admits; what is left goes to guesses."""
        chunks = self._plan()
        left = self._step_tokens - sum(chunk.length for chunk in chunks)
        if left > 0 and self._branches is not None:
            places, wanted = [], []
            for place, chunk in enumerate(chunks):
                most = self._most_guesses(chunk.sequence, left)
                if most > 0:
                    places.append(place)
                    wanted.append(Wanted(chunk.sequence, most, self._branching))
            guesses = self._proposer.propose(wanted, left) if wanted else []
            for place, guess in zip(places, guesses, strict=True):
                chunks[place] = self._with_guess(chunks[place], guess, self._branches)
        return chunks

    def _most_guesses(self, sequence: Sequence, left: int) -> int:
        most = min(left, sequence.most_guesses(self._guesses))
        return self.prefixes.chunk(sequence, 1 + most) - 1 if most > 0 else 0

    def _with_guess(self, chunk: Chunk, guess: TokenTree, store: BranchingStore) -> Chunk:
        """The chunk with what is guessed to follow, where there is room for it without throwing anybody out."""
        sequence = chunk.sequence
        if not guess or not self._store.reserve(sequence.number, sequence.computed + 1 + len(guess)):
            return chunk
        store.mark(sequence.number, sequence.computed)
        return Chunk(sequence, 1, guess, sequence.accepted)

    def _plan(self) -> list[Chunk]:
        preemptions = self.preemptions
        running = sorted(self.running.values(), key=_rank)
        chunks = self._go_on([s for s in running if s.pending == 1], self._step_tokens)
        for tenant, tokens in Counter(chunk.sequence.request.tenant for chunk in chunks).items():
            self.shares.charge(tenant, tokens)
        left = self._step_tokens - len(chunks)
        chunks += self._go_on([s for s in running if s.pending > 1], left)
        left = self._step_tokens - sum(chunk.length for chunk in chunks)
        # A victim of this step would only be admitted again to be thrown out in the next.
        if self.preemptions == preemptions:
            chunks += self._admit(left)
            return chunks
        return [chunk for chunk in chunks if chunk.sequence.number in self.running]

    def _go_on(self, sequences: Iterable[Sequence], left: int) -> list[Chunk]:
        chunks = []
        for sequence in sequences:
            length = min(sequence.pending, left)
            if length < 1 or sequence.number not in self.running:
                continue
            if length > 1:
                length = self.prefixes.chunk(sequence, length)
            if self._make_room(sequence, sequence.computed + length):
                chunks.append(Chunk(sequence, length))
                left -= length
        return chunks

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve, at the expense of less urgent sequences; False where the sequence itself had to leave."""
        while not self._store.reserve(sequence.number, tokens):
            self._preempt(max(self.running.values(), key=_rank))
            if sequence.number not in self.running:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        for sequence in victim.gang:
            if sequence.number in self.running:
                self.offload.keep(sequence)
        self._leave(victim)

    def _leave(self, victim: Sequence) -> None:
        for sequence in victim.gang:
            if self.running.pop(sequence.number, None):
                self._store.release(sequence.number)
                self._proposer.forget(sequence)
                sequence.forget()
                self.waiting.append(sequence)
        self.preemptions += 1

    def _admit(self, left: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self.waiting:
            self.shares.settle(s.request.tenant for s in (*self.waiting, *self.running.values()))
            self.waiting.sort(key=_rank)
        while self.waiting and left > 0:
            first = min(self.waiting, key=self._turn)
            gang = [sequence for sequence in self.waiting if sequence.gang is first.gang]
            if not self._enter(gang):
                break
            for sequence in gang:
                self.waiting.remove(sequence)
                self.running[sequence.number] = sequence
                sequence.adopted_in_all += sequence.computed
                self.shared_tokens += sequence.computed
                self.offload.reload(sequence, _room(sequence))
                self.shares.charge(sequence.request.tenant, sequence.pending)
                length = self.prefixes.chunk(sequence, min(sequence.pending, left)) if left > 0 else 0
                if length > 0:
                    chunks.append(Chunk(sequence, length))
                    left -= length
        return chunks

    def _turn(self, sequence: Sequence) -> tuple[int, float, int, int]:
        """Sorts who is next to enter: priority, then the tenant that was served least, then age.

        Only who enters is decided so. Who must leave is decided by age, or two tenants would throw out each other.
        """
        urgency, order, number = sequence.rank
        return urgency, self.shares.served(sequence.request.tenant), order, number

    def _enter(self, gang: list[Sequence]) -> bool:
        """Take all of them into the store, or none."""
        for place, sequence in enumerate(gang):
            if self._enter_one(sequence):
                continue
            for entered in gang[:place]:
                self._store.release(entered.number)
                entered.forget()
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
        sequence.forget()
        return False


def _room(sequence: Sequence) -> int:
    """Tokens of all that is known, and a token more, so that it is not thrown out before it has made one."""
    return len(sequence.tokens) + (sequence.scoring is None)
