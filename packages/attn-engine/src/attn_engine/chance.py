"""Random numbers that depend on seed and position alone, so batches and preemptions cannot change a choice."""

from __future__ import annotations

import hashlib


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` of a sequence: 53 bits of a hash used as a counter generator."""
    counter = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little") >> 11
    return bits / 2**53
