"""One seed for a job, another for each of its uses."""

from __future__ import annotations

import hashlib


def derived(seed: int, use: str) -> int:
    """A seed of 63 bits for `use`: equal streams for initial weights, batches and dropout would be correlated."""
    digest = hashlib.sha256(f"{seed}:{use}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
