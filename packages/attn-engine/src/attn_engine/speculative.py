"""Speculative decoding: proposers of draft tokens, and the verification of drafts.

Every position gets the token that would have been chosen without a draft: the most likely one, or the one sampled with
the random number of that position. A draft token equal to it is accepted, and the result for the next position is then
valid; the KV cache from the first differing draft token on is rolled back. Drafts change only the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, cast

from attn_core.models import BatchInvariant
from attn_core.stores import BranchingStore, TreeStore

from attn_engine import sequence as sequences
from attn_engine.draft_tokens import LONGEST_DRAFT, MAX_NGRAM, NO_DRAFT, TokenTree
from attn_engine.sequence import SequenceOutput

MOST_TOGETHER = 8
"""The maximum number of sequences in a step in which requests that set no number of draft tokens get drafts."""


@dataclass(frozen=True)
class DraftRequest:
    """A request for a draft of a decoding sequence: at most `max_tokens` tokens with `tree_width` candidates each."""

    sequence: sequences.Sequence
    max_tokens: int
    tree_width: int = 1


class Proposer(Protocol):
    """Proposes draft tokens. The proposals change the number of steps and nothing else."""

    default_tokens: ClassVar[int]
    """The maximum number of draft tokens of a sequence in a step if neither its request nor the engine sets one."""

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int) -> list[TokenTree]:
        """A draft for each sequence, which may be empty; at most `max_tokens` draft tokens in all."""
        ...

    def forget(self, sequence: sequences.Sequence) -> None:
        """Free what the proposer holds for a sequence that has ended or was preempted."""
        ...


class PromptLookupProposer:
    """Prompt lookup: proposes the tokens that followed earlier occurrences of the last tokens in the sequence."""

    default_tokens: ClassVar[int] = 0

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int) -> list[TokenTree]:
        """See `Proposer.propose`."""
        drafts = []
        for one in requests:
            draft = TokenTree()
            if max_tokens > 0:
                draft = one.sequence.lookup.draft(one.sequence.tokens, one.max_tokens, one.tree_width)
            drafts.append(draft.first(max_tokens))
            max_tokens -= len(drafts[-1])
        return drafts

    def forget(self, sequence: sequences.Sequence) -> None:
        """Do nothing, as all state is held in the sequence."""


class AdaptivePromptLookup(PromptLookupProposer):
    """Prompt lookup also for requests that do not set a number of draft tokens, as long as it pays.

    In small steps reading the weights dominates, so a draft costs less than the steps that it may save; in larger steps
    it does not. Drafts for these requests follow only n-grams of `MAX_NGRAM` tokens, and each sequence has its own
    `DraftLength`. Requests that set a number of draft tokens get plain prompt lookup; the others get no drafts while
    `model` is not batch invariant, or in steps with requests that have adapters.
    """

    default_tokens: ClassVar[int] = LONGEST_DRAFT

    def __init__(self, model: BatchInvariant) -> None:
        self._model = model

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int) -> list[TokenTree]:
        """See `Proposer.propose`."""
        chosen = [one for one in requests if one.sequence.num_speculative_tokens is not None]
        drafts = dict(zip((id(one) for one in chosen), super().propose(chosen, max_tokens), strict=True))
        left = max_tokens - sum(map(len, drafts.values()))
        # Steps with adapters do not use fused blocks, so their results are not batch invariant.
        adapted = any(one.sequence.request.adapter is not None for one in requests)
        adapts = len(requests) <= MOST_TOGETHER and self._model.batch_invariant and not adapted
        found = []
        for one in requests:
            draft = drafts.get(id(one))
            if draft is None:
                draft = self._adapted(one, left) if adapts else NO_DRAFT
                left -= len(draft)
            found.append(draft)
        return found

    def _adapted(self, one: DraftRequest, left: int) -> TokenTree:
        sequence = one.sequence
        count = min(left, one.max_tokens, sequence.draft_length.next(len(sequence.tokens), sequence.accepted))
        if count < 1:
            return NO_DRAFT
        draft = sequence.lookup.draft(sequence.tokens, count, shortest=MAX_NGRAM)
        sequence.draft_length.proposed(len(draft))
        return draft


ChooseNext = Callable[[Sequence[tuple[sequences.Sequence, int]]], list[SequenceOutput]]
"""Chooses the next token of each sequence, given with the row of its logits."""


@dataclass
class Verification:
    """The draft of a sequence: `rows` are the logit rows after each draft token, `accepted` the nodes accepted yet."""

    sequence: sequences.Sequence
    draft: TokenTree
    rows: range
    accepted: list[int] = field(default_factory=list)

    def accept(self, output: SequenceOutput) -> bool:
        """Accept the draft node of the output's last token; False if it was not drafted, or the sequence has ended."""
        if output.ended:
            return False
        node = self.draft.child(self.accepted[-1] if self.accepted else -1, output.tokens[-1].id)
        if node is None:
            return False
        self.accepted.append(node)
        self.sequence.accepted += 1
        return True


def verify(first: Sequence[SequenceOutput], drafts: Sequence[Verification], choose: ChooseNext) -> list[SequenceOutput]:
    """Verify the drafts: extend the outputs `first`, before the drafts, by those after each accepted draft token."""
    found = {output.sequence.number: output for output in first}
    going_on = list(drafts)
    while going_on := [one for one in going_on if one.accept(found[one.sequence.number])]:
        for output in choose([(one.sequence, one.rows[one.accepted[-1]]) for one in going_on]):
            number = output.sequence.number
            found[number] = found[number].then(output)
    return list(found.values())


def roll_back(verified: Verification, store: BranchingStore) -> None:
    """Keep the KV cache of the accepted tokens of a sequence that continues, and roll back the rest of the draft."""
    sequence, known = verified.sequence, verified.sequence.computed
    accepted_len = len(sequence.tokens) - 1
    if verified.draft.is_tree:
        path = [known + node for node in verified.accepted]
        cast("TreeStore", store).accept_path(sequence.number, known, path)
        sequence.computed = accepted_len
    else:
        computed = known + len(verified.draft)
        sequence.computed = computed if accepted_len == computed else store.rewind(sequence.number, accepted_len)
