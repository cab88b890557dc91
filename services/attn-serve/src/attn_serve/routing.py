"""Prefix-aware routing: a prompt goes to a replica that has computed its prefix, unless that replica is overloaded."""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from attn_schema import Prompt

BLOCK_BYTES = 128
"""Bytes of a prompt that are hashed together: about 32 tokens of text."""
MAX_BLOCKS = 512
"""Most blocks of a prompt that are hashed; prompts whose first blocks are equal up to this count as equal."""
MAX_REMEMBERED = 2**17
"""Most blocks recorded over all prompts; the least recently used are dropped."""
MAX_HOLDERS = 8
"""Most replicas recorded for each block."""
LOAD_BOUND = 1.25
"""A replica is chosen for a prompt's prefix while its load is at most this factor times the mean load (Mirrokni et al.
2018, "Consistent Hashing with Bounded Loads", arXiv 1608.01350)."""


def block_hashes(prompt: Prompt, tenant: str) -> list[bytes]:
    """One hash per whole block of a prompt, over all bytes up to the block's end. Hashes of tenants never match."""
    chain = hashlib.blake2b(digest_size=12, key=hashlib.blake2b(tenant.encode(), digest_size=32).digest())
    data = first_bytes(prompt, MAX_BLOCKS * BLOCK_BYTES)
    found = []
    for start in range(0, len(data) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES):
        chain.update(data[start : start + BLOCK_BYTES])
        found.append(chain.digest())
    return found


def first_bytes(prompt: Prompt, most: int) -> bytes:
    """The first bytes of a prompt, in the order in which a model reads it, at most so many."""
    data = bytearray()
    for part in parts_of(prompt, most):
        data += part
        if len(data) >= most:
            break
    return bytes(data[:most])


def parts_of(prompt: Prompt, most: int) -> Iterator[bytes]:
    """The parts of a prompt as bytes, and of each so many at least; each kind of prompt has another first byte."""
    if prompt.encoder_prompt is not None:
        encoder = prompt.encoder_prompt
        yield b"e" + (encoder.text or "")[:most].encode() + array("i", (encoder.token_ids or ())[:most]).tobytes()
    if prompt.token_ids is not None:
        yield b"i" + array("i", prompt.token_ids[:most]).tobytes()
    elif prompt.chat is not None:
        yield from (f"\x02{turn.role}\x1f{turn.content[:most]}".encode() for turn in prompt.chat)
    else:
        yield b"t" + (prompt.text or "")[:most].encode()


class PrefixRouter:
    """Records which replicas computed the prefixes of prompts, and chooses a replica by prefix and load.

    The load is a number of requests. If no replica is recorded for a prompt's prefix, the less loaded of two random
    replicas is chosen (Mitzenmacher 2001, "The Power of Two Choices in Randomized Load Balancing").
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self.hits = 0
        """The number of prompts that went to a replica recorded for their prefix."""
        self.misses = 0

    def choose(self, blocks: Sequence[bytes], loads: Mapping[str, float]) -> str:
        """Choose the replica for a prompt of these blocks among the keys of `loads`, and record it for them.

        Raises `LookupError` if `loads` is empty.
        """
        if not loads:
            raise LookupError("no replica")
        chosen = self._holder(blocks, loads)
        if chosen is None:
            self.misses += 1
            names = list(loads)
            pair = self._rng.sample(names, 2) if len(names) > 1 else names
            chosen = min(pair, key=loads.__getitem__)
        else:
            self.hits += 1
        self._remember(blocks, chosen)
        return chosen

    def forget(self, replica: str) -> None:
        """Remove a replica that is gone from all blocks."""
        for block, holders in list(self._holders.items()):
            if replica in holders:
                left = tuple(name for name in holders if name != replica)
                if left:
                    self._holders[block] = left
                else:
                    del self._holders[block]

    def _holder(self, blocks: Sequence[bytes], loads: Mapping[str, float]) -> str | None:
        """The least loaded replica of those within the load bound that are recorded for the longest prefix."""
        if not any(block in self._holders for block in blocks[:1]):
            return None
        bound = math.ceil(LOAD_BOUND * (sum(loads.values()) + 1) / len(loads))
        for block in reversed(blocks):
            free = [name for name in self._holders.get(block, ()) if loads.get(name, math.inf) + 1 <= bound]
            if free:
                return min(free, key=loads.__getitem__)
        return None

    def _remember(self, blocks: Sequence[bytes], replica: str) -> None:
        for block in blocks:
            holders = self._holders.pop(block, ())
            self._holders[block] = (replica, *(name for name in holders if name != replica))[:MAX_HOLDERS]
        while len(self._holders) > MAX_REMEMBERED:
            self._holders.popitem(last=False)
