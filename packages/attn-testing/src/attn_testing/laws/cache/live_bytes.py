"""The store weighs what the formula says."""

from __future__ import annotations

from attn_testing.cache_subject import SIZE, CacheCase
from attn_testing.expect import require
from attn_testing.law import Law
from attn_testing.traffic import Traffic


class LiveBytes(Law):
    """What a request has in the store weighs exactly what its family says of its states, after every step.

    Where nothing is lost that is `state_bytes` of them.
    """

    def test_live_bytes_equal_the_formula(self, case: CacheCase) -> None:
        traffic = Traffic(case, seed=0)
        traffic.admit()
        traffic.admit()
        for length in (1, 4, 1, 1, 6, 2):
            traffic.step(dict.fromkeys(traffic.done, length))
            for name, tokens in traffic.done.items():
                source = traffic.sources[name]
                said = case.family.bytes(case.specs, tokens=tokens, source=source, dtype=SIZE.dtype)
                held = traffic.store.live_bytes(name, tokens)
                require(held == said, f"after {tokens} tokens {held} bytes are held, the family says {said}")
