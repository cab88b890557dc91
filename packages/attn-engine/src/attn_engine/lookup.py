"""Guesses of what comes next: what followed the same few tokens when they last occurred.

Saxena 2023, "Prompt Lookup Decoding"; a guess is a distribution of one token in the sense of Leviathan et al. 2023,
"Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 3
"""Tokens that are looked for at most; a longer match is trusted before a shorter one."""


class Lookup:
    """Where every few tokens of a growing sequence occurred last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow; `tokens` is what it was before, grown."""
        # The end itself is not noted: it would only find itself.
        for end in range(self._seen + 1, len(tokens)):
            for length in range(1, min(LONGEST, end) + 1):
                self._after[tuple(tokens[end - length : end])] = end
        self._seen = max(self._seen, len(tokens) - 1)
        for length in range(min(LONGEST, len(tokens)), 0, -1):
            found = self._after.get(tuple(tokens[-length:]))
            if found is not None:
                return list(tokens[found : found + most])
        return []
