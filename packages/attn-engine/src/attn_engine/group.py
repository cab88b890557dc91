"""The completions of one request."""

from __future__ import annotations

from attn_engine.event import RequestUsage
from attn_engine.hypotheses import Hypotheses
from attn_engine.sequence import Sequence


class Group:
    """Those completions of a request that have not ended, and what those that have ended cost.

    With `beams`, the members only stand for the completions that the search will find.
    """

    def __init__(self, members: list[Sequence], beams: Hypotheses | None = None) -> None:
        self.members = members
        self.beams = beams
        self.deadline = members[0].request.deadline
        self._usage: RequestUsage | None = None

    @property
    def usage(self) -> RequestUsage | None:
        """What the request cost, once none of its completions goes on."""
        return None if self.members else self._usage

    @property
    def held(self) -> list[Sequence]:
        """All sequences that may hold states."""
        return self.beams.everyone if self.beams else self.members

    def remove(self, sequence: Sequence) -> None:
        """Note that a completion has ended."""
        self.members.remove(sequence)
        own = sequence.usage
        self._usage = own if self._usage is None else self._usage.plus(own, first=sequence.choice == 0)
