"""Draft tokens of speculative decoding: a tree of candidates, and finding them in the text itself (prompt lookup).

Saxena 2023, "Prompt Lookup Decoding". A draft is a distribution of one token in the sense of Leviathan et al. 2023,
"Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from attn_core.masks import Tree

MAX_NGRAM = 3
"""Longest n-gram that is looked up; longer matches are preferred."""
POSITIONS_PER_NGRAM = 8
"""Latest positions looked at for each n-gram."""
TOKEN = array("I").itemsize
"""Bytes of a token id where texts are searched."""
FIRST_DRAFT, LONGEST_DRAFT = 2, 8
"""Draft tokens of a sequence whose drafts nobody knows yet, and of one whose drafts are accepted again and again."""
LONGEST_PAUSE = 64
"""Tokens for which a sequence whose drafts are rejected again and again gets none."""


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens; `parents` gives the index of the token before each, smaller than its own, or -1 for the root.

    The root is the last token of the sequence that is known.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """Each token after the one before."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_tree(self) -> bool:
        """Whether it is more than a chain."""
        return self.parents != tuple(range(-1, len(self.tokens) - 1))

    def path(self, node: int) -> list[int]:
        """The ancestors of a node, oldest first, and itself."""
        return self._mask.path(node)[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The node of this token after `node`."""
        return self._children.get((node, token))

    def first(self, count: int) -> TokenTree:
        """The tree of its first tokens."""
        return TokenTree(self.tokens[:count], self.parents[:count]) if count < len(self) else self

    @cached_property
    def _mask(self) -> Tree:
        return Tree(self.parents)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        # Of two equal children the first, which was the more likely.
        pairs = list(zip(self.parents, self.tokens, strict=True))
        return {pair: node for node, pair in reversed(list(enumerate(pairs)))}


NO_DRAFT = TokenTree()


class TokenTreeBuilder:
    """Builds a tree of at most `max_tokens` tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self._max_tokens - len(self._tokens)

    def add(self, parent: int, token: int) -> int | None:
        """Add a token after a node, -1 for the root; returns its node, new or not, or None without room."""
        known = self._children.get((parent, token))
        if known is not None:
            return known
        if not self.room:
            return None
        self._tokens.append(token)
        self._parents.append(parent)
        node = self._children[parent, token] = len(self._tokens) - 1
        return node

    def add_chain(self, tokens: Sequence[int]) -> bool:
        """Add tokens one after the other from the root; whether any of them was new."""
        before, node = len(self._tokens), -1
        for token in tokens:
            found = self.add(node, token)
            if found is None:
                break
            node = found
        return len(self._tokens) > before

    @property
    def tree(self) -> TokenTree:
        """The tree so far."""
        return TokenTree(tuple(self._tokens), tuple(self._parents))


class PromptLookup:
    """Drafts what followed the last tokens of a growing sequence where they occurred before.

    The text is searched as bytes, the latest first: 8000 tokens take some ten microseconds and nothing but their ids is
    kept.
    """

    def __init__(self) -> None:
        self._text = bytearray()

    def draft(self, tokens: Sequence[int], max_tokens: int, tree_width: int = 1, shortest: int = 1) -> TokenTree:
        """At most `tree_width` continuations of `max_tokens` tokens behind n-grams of at least `shortest` tokens.

        `tokens` only grows between calls. Continuations with a common prefix share its nodes.
        """
        self._text += array("I", tokens[len(self._text) // TOKEN :]).tobytes()
        found, continuations = TokenTreeBuilder(max_tokens * tree_width), 0
        for length in range(min(MAX_NGRAM, len(tokens)), shortest - 1, -1):
            for end in self._ends(length):
                continuations += found.add_chain(tokens[end : end + max_tokens])
                if continuations == tree_width:
                    return found.tree
        return found.tree

    def _ends(self, length: int) -> Iterator[int]:
        """Where the last `length` tokens ended before, the latest first."""
        last = bytes(self._text[-length * TOKEN :])
        stop = len(self._text) - TOKEN  # the last n-gram would only find itself
        for _ in range(POSITIONS_PER_NGRAM):
            start = self._text.rfind(last, 0, stop)
            while start >= 0 and start % TOKEN:  # between tokens
                start = self._text.rfind(last, 0, start + len(last) - 1)
            if start < 0:
                return
            yield start // TOKEN + length
            stop = start + len(last) - TOKEN


class DraftLength:
    """How many draft tokens a sequence gets next: twice as many after a draft that was accepted whole, and none for a
    while after one of which less than half was, twice as long after each.
    """

    def __init__(self) -> None:
        self._length = FIRST_DRAFT
        self._drafted = 0
        self._accepted = 0
        self._failures = 0
        self._resume = 0

    def next(self, tokens: int, accepted: int) -> int:
        """Draft tokens for a sequence of so many tokens, of whose drafts so many have been accepted in all."""
        if self._drafted:
            right = accepted - self._accepted
            if 2 * right < self._drafted:
                self._failures += 1
                self._length = FIRST_DRAFT
                self._resume = tokens + min(2**self._failures, LONGEST_PAUSE)
            else:
                self._failures = 0
                if right == self._drafted:
                    self._length = min(2 * self._length, LONGEST_DRAFT)
            self._drafted = 0
        self._accepted = accepted
        return self._length if tokens >= self._resume else 0

    def proposed(self, count: int) -> None:
        """Note how many were proposed."""
        self._drafted = count
