"""Which beginnings of sequences are remembered: blocks of tokens, each under a hash of all that came before it.

A hash alone is not trusted: the key is secret to the process, and the tokens of a block are compared when it is found
(Kwon et al. 2023, arXiv 2309.06180, section 4.4, shares prefixes by blocks in this way).
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from attn_cache.fixed import Snapshot


@dataclass
class Block:
    """One remembered block: its tokens, its page of every window that still had one, perhaps the fixed states."""

    tokens: tuple[int, ...]
    pages: Mapping[int | None, int]
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class Chain:
    """The hash of a sequence's first `blocks` blocks."""

    blocks: int
    link: bytes


class PrefixIndex:
    """Blocks of `size` tokens by the hash of their beginning, the least recently used first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._secret = os.urandom(blake2b.MAX_KEY_SIZE)
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def root(self, scope: str) -> Chain:
        """The chain of no blocks; those of different scopes never meet."""
        return Chain(0, blake2b(scope.encode(), key=self._secret).digest())

    def follow(self, chain: Chain, tokens: Sequence[int], end: int) -> Iterator[tuple[Chain, tuple[int, ...]]]:
        """The chain after each further whole block of the first `end` tokens, and the tokens of that block."""
        for start in range(chain.blocks * self._size, end - self._size + 1, self._size):
            block = tuple(tokens[start : start + self._size])
            link = blake2b(chain.link + array("q", block).tobytes(), key=self._secret).digest()
            chain = Chain(chain.blocks + 1, link)
            yield chain, block

    def find(self, tokens: Sequence[int], scope: str) -> list[tuple[Chain, Block]]:
        """The remembered blocks with which the sequence begins; they count as used now."""
        found = []
        for chain, block in self.follow(self.root(scope), tokens, len(tokens)):
            known = self._blocks.get(chain.link)
            if known is None or known.tokens != block:
                break
            found.append((chain, known))
        # The first block last: a block is of no use without those before it, so they should outlive it.
        for chain, _ in reversed(found):
            self._blocks.move_to_end(chain.link)
        return found

    def get(self, chain: Chain) -> Block | None:
        """The block at the end of the chain."""
        return self._blocks.get(chain.link)

    def add(self, chain: Chain, block: Block) -> None:
        """Remember a block that is not remembered."""
        self._blocks[chain.link] = block

    def oldest(self) -> Block:
        """Forget the block that was not used for longest, and return it."""
        return self._blocks.popitem(last=False)[1]
