"""Draft tokens of speculative decoding: trees of candidates, and prompt lookup, which finds them in the text itself.

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
"""The length of the longest n-gram that is looked up; longer matches are preferred."""
POSITIONS_PER_NGRAM = 8
"""The number of most recent occurrences that are considered for each n-gram."""
TOKEN_BYTES = array("I").itemsize
"""The bytes of a token id in the searched text."""
FIRST_DRAFT, LONGEST_DRAFT = 2, 8
"""The draft length of a sequence without a history of drafts, and the limit for one whose drafts are all accepted."""
LONGEST_PAUSE = 64
"""The maximum number of tokens for which a sequence whose drafts are rejected gets no drafts."""


@dataclass(frozen=True)
class TokenTree:
    """A tree of draft tokens; `parents` holds the index of each token's parent, which precedes it, or -1 for the root.

    The root is the last known token of the sequence and is not part of `tokens`.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """A tree without branches: each token follows the previous one."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_tree(self) -> bool:
        """Whether it has branches, and is not merely a chain."""
        return self.parents != tuple(range(-1, len(self.tokens) - 1))

    def path(self, node: int) -> list[int]:
        """The path from the root to a node: its ancestors, oldest first, and the node itself."""
        return self._mask.path(node)[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with this token; None if there is none."""
        return self._children.get((node, token))

    def first(self, count: int) -> TokenTree:
        """The tree of its first `count` tokens."""
        return TokenTree(self.tokens[:count], self.parents[:count]) if count < len(self) else self

    @cached_property
    def _mask(self) -> Tree:
        return Tree(self.parents)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        # Of two equal children the first is kept, as it was the more likely one.
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
        """The number of tokens that may still be added."""
        return self._max_tokens - len(self._tokens)

    def add(self, parent: int, token: int) -> int | None:
        """Add a token after a node (-1 for the root); returns its node, new or existing, or None without room."""
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
        """Add a chain of tokens from the root; returns whether any of them was new."""
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
    """Drafts the tokens that followed earlier occurrences of the last tokens of a growing sequence.

    The token ids are searched as bytes, most recent occurrence first: 8000 tokens take some ten microseconds, and
    nothing but the ids is stored.
    """

    def __init__(self) -> None:
        self._text = bytearray()

    def draft(self, tokens: Sequence[int], max_tokens: int, tree_width: int = 1, shortest: int = 1) -> TokenTree:
        """At most `tree_width` continuations of up to `max_tokens` tokens, found after n-grams of at least `shortest`
        tokens.

        `tokens` may only grow between calls. Continuations with a common prefix share its nodes.
        """
        self._text += array("I", tokens[len(self._text) // TOKEN_BYTES :]).tobytes()
        found, continuations = TokenTreeBuilder(max_tokens * tree_width), 0
        for length in range(min(MAX_NGRAM, len(tokens)), shortest - 1, -1):
            for end in self._ends(length):
                continuations += found.add_chain(tokens[end : end + max_tokens])
                if continuations == tree_width:
                    return found.tree
        return found.tree

    def _ends(self, length: int) -> Iterator[int]:
        """The end positions of earlier occurrences of the last `length` tokens, most recent first."""
        last = bytes(self._text[-length * TOKEN_BYTES :])
        stop = len(self._text) - TOKEN_BYTES  # the last n-gram would only find itself
        for _ in range(POSITIONS_PER_NGRAM):
            start = self._text.rfind(last, 0, stop)
            while start >= 0 and start % TOKEN_BYTES:  # between tokens
                start = self._text.rfind(last, 0, start + len(last) - 1)
            if start < 0:
                return
            yield start // TOKEN_BYTES + length
            stop = start + len(last) - TOKEN_BYTES


class DraftLength:
    """Adapts the draft length of a sequence to how many of its draft tokens are accepted.

    The length doubles after a draft that was accepted completely. After one of which less than half was accepted, the
    sequence gets no drafts for a number of tokens, which doubles with each consecutive failure.
    """

    def __init__(self) -> None:
        self._length = FIRST_DRAFT
        self._drafted = 0
        self._accepted = 0
        self._failures = 0
        self._resume = 0

    def next(self, tokens: int, accepted: int) -> int:
        """The length of the next draft for a sequence of `tokens` tokens, which has `accepted` draft tokens so far."""
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
        """Record the number of draft tokens that were proposed."""
        self._drafted = count
