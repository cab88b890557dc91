"""The group of all completions of one request."""

from __future__ import annotations

from attn_schema import Usage

from attn_engine.beam_search import BeamSearch
from attn_engine.sequence import Sequence


class SequenceGroup:
    """The completions of one request that have not ended, and the usage of those that have.

    With `beams`, the members are placeholders for the completions that the search will find.
    """

    def __init__(self, members: list[Sequence], beams: BeamSearch | None = None) -> None:
        self.members = members
        self.beams = beams
        self.deadline = members[0].request.deadline
        request = members[0].request
        self._prompt_tokens = len(request.token_ids)
        self._cached_tokens = 0
        self._queue_time: float | None = None
        left = set(request.open_indices)
        self.completion_tokens = sum(len(request.received(index)) for index in range(request.n) if index not in left)
        self.begun = False
        """Whether any output of it has been returned."""

    @property
    def usage(self) -> Usage | None:
        """The usage of the request once all its completions have ended; None before."""
        if self.members:
            return None
        return Usage(
            prompt_tokens=self._prompt_tokens,
            # A preempted sequence may have found its own generated tokens in the cache: count at most the prompt.
            cached_tokens=min(self._cached_tokens, self._prompt_tokens),
            completion_tokens=self.completion_tokens,
            queue_time=self._queue_time,
        )

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the request that may hold KV cache."""
        return self.beams.sequences if self.beams else self.members

    def remove(self, sequence: Sequence) -> None:
        """Remove a completion that has ended; the usage takes cached tokens and queue time from the one of index 0."""
        self.members.remove(sequence)
        self.completion_tokens += sequence.generated
        if sequence.index == 0:
            self._cached_tokens = sequence.cached_tokens
            self._queue_time = sequence.queue_time
