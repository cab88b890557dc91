"""The completions of one request."""

from __future__ import annotations

from attn_engine.event import RequestUsage
from attn_engine.sequence import Sequence


class Group:
    """Those completions of a request that have not ended, and what those that have ended cost."""

    def __init__(self, members: list[Sequence]) -> None:
        self.members = members
        self.deadline = members[0].request.deadline
        self._usage: RequestUsage | None = None

    @property
    def usage(self) -> RequestUsage | None:
        """What the request cost, once none of its completions goes on."""
        return None if self.members else self._usage

    def remove(self, sequence: Sequence) -> None:
        """Note that a completion has ended."""
        self.members.remove(sequence)
        own = sequence.usage
        self._usage = own if self._usage is None else self._usage.plus(own, first=sequence.choice == 0)
