"""Guesses of what comes next: what followed the same few tokens when they last occurred.

Saxena 2023, "Prompt Lookup Decoding"; a guess is a distribution of one token in the sense of Leviathan et al. 2023,
"Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attn_engine.token_tree import Growth, TokenTree

LONGEST = 3
"""Tokens that are looked for at most; a longer match is trusted before a shorter one."""

KEPT = 8
"""Places that are known of the same few tokens at most, the last ones."""


class Lookup:
    """Where every few tokens of a growing sequence occurred last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], deque[int]] = {}
        self._seen = 0

    def guess(self, tokens: Sequence[int], most: int, branches: int = 1) -> TokenTree:
        """What may follow: at most so many continuations of at most `most` tokens; `tokens` is what it was, grown.

        Continuations that begin alike have that in common.
        """
        self._note(tokens)
        found, continuations = Growth(most * branches), 0
        for length in range(min(LONGEST, len(tokens)), 0, -1):
            for end in reversed(self._after.get(tuple(tokens[-length:]), ())):
                continuations += found.add_all(tokens[end : end + most])
                if continuations == branches:
                    return found.tree
        return found.tree

    def _note(self, tokens: Sequence[int]) -> None:
        # The end itself is not noted: it would only find itself.
        for end in range(self._seen + 1, len(tokens)):
            for length in range(1, min(LONGEST, end) + 1):
                self._after.setdefault(tuple(tokens[end - length : end]), deque(maxlen=KEPT)).append(end)
        self._seen = max(self._seen, len(tokens) - 1)
