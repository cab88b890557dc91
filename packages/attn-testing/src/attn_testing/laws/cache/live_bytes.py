"""The store weighs what the formula says."""

from __future__ import annotations

from attn_core import state_bytes

from attn_testing.cache_subject import SIZE, CacheCase
from attn_testing.expect import require
from attn_testing.law import Law
from attn_testing.traffic import Traffic


class LiveBytes(Law):
    """What a request has in the store weighs exactly `state_bytes` of its states, after every step."""

    def test_live_bytes_equal_the_formula(self, case: CacheCase) -> None:
        traffic = Traffic(case, seed=0)
        traffic.admit()
        traffic.admit()
        for length in (1, 4, 1, 1, 6, 2):
            traffic.step(dict.fromkeys(traffic.done, length))
            for name, tokens in traffic.done.items():
                said = sum(
                    state_bytes(states, tokens=tokens, source=traffic.sources[name], dtype=SIZE.dtype)
                    for states in case.specs.values()
                )
                held = traffic.store.live_bytes(name, tokens)
                require(held == said, f"after {tokens} tokens {held} bytes are held, the specs say {said}")
