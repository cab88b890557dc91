"""Tokens that may come next, several of them after the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from attn_core.masks import Tree


@dataclass(frozen=True)
class TokenTree:
    """Guessed tokens, each after its parent: the place of another in `tokens`, before it, or -1 for the known ones."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """Each token after the one before."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def branches(self) -> bool:
        """Whether it is more than a chain."""
        return self.parents != tuple(range(-1, len(self.tokens) - 1))

    def path(self, node: int) -> list[int]:
        """The token's ancestors, oldest first, and itself."""
        return self._mask.path(node)[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The place of this token after the one at `node`."""
        return self._children.get((node, token))

    def first(self, most: int) -> TokenTree:
        """Its first tokens, whose parents are among them."""
        return TokenTree(self.tokens[:most], self.parents[:most]) if most < len(self) else self

    @cached_property
    def _mask(self) -> Tree:
        return Tree(self.parents)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        # The first of two equal ones, which was thought the likelier.
        pairs = list(zip(self.parents, self.tokens, strict=True))
        return {pair: node for node, pair in reversed(list(enumerate(pairs)))}


class Growth:
    """A tree that grows, with at most so many tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int:
        """How many tokens may yet be added."""
        return self._most - len(self._tokens)

    def add(self, parent: int, token: int) -> int | None:
        """Let a token follow another, -1 for the known ones; its place, also where it was there; None without room."""
        known = self._children.get((parent, token))
        if known is not None:
            return known
        if not self.room:
            return None
        self._tokens.append(token)
        self._parents.append(parent)
        node = self._children[parent, token] = len(self._tokens) - 1
        return node

    def add_all(self, tokens: Sequence[int]) -> bool:
        """Let a continuation begin behind the known tokens; whether it was not there already, and had room."""
        before, node = len(self._tokens), -1
        for token in tokens:
            found = self.add(node, token)
            if found is None:
                break
            node = found
        return len(self._tokens) > before

    @property
    def tree(self) -> TokenTree:
        """What has grown."""
        return TokenTree(tuple(self._tokens), tuple(self._parents))


NOTHING = TokenTree()
"""No guess."""
