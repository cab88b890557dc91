"""What is released can be used again, all of it."""

from __future__ import annotations

from attn_testing.cache_subject import CacheCase
from attn_testing.expect import require
from attn_testing.law import Law
from attn_testing.traffic import Traffic

CYCLES = 6


class ReleaseFreesAll(Law):
    """Releasing every request leaves the store as it was new, and with room for as much again."""

    def test_after_all_are_released_the_store_is_as_new(self, case: CacheCase) -> None:
        traffic = Traffic(case, seed=0)
        empty = traffic.store.usage()
        held: list[list[list[int]]] = []
        for _ in range(CYCLES):
            while traffic.admit():
                pass
            names = list(traffic.done)
            rooms = [traffic.room(dict.fromkeys(names, tokens)) for tokens in (8, 24, 40)]
            held.append([[names.index(name) for name in room] for room in rooms])
            for name in traffic.random.sample(names, len(names)):
                traffic.release(name)
            require(traffic.store.usage() == empty, f"after all are released usage is {traffic.store.usage()}")
        require(all(cycle == held[0] for cycle in held), "requests found less room than those released before them")
