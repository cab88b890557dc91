"""A full store says so and stays as it was."""

from __future__ import annotations

from attn_testing.cache_subject import SIZE, CacheCase
from attn_testing.expect import require
from attn_testing.law import Law
from attn_testing.traffic import Traffic


class RefusesWhenFull(Law):
    """A store that has no place or no room says False, and changes nothing."""

    def test_no_more_requests_are_admitted_than_there_are_places(self, case: CacheCase) -> None:
        traffic = Traffic(case, seed=0)
        for place in range(SIZE.requests):
            require(traffic.admit(), f"request {place + 1} of {SIZE.requests} is not admitted")
        before = traffic.store.usage()
        require(before.requests == before.requests_total == SIZE.requests, f"a store full of requests says {before}")
        require(not traffic.admit(), f"request {SIZE.requests + 1} of {SIZE.requests} is admitted")
        require(traffic.store.usage() == before, f"refusing a request changed {before} to {traffic.store.usage()}")
        traffic.step(dict.fromkeys(traffic.done, 2))

    def test_room_that_is_not_there_is_refused_and_nothing_changes(self, case: CacheCase) -> None:
        if not case.paged:
            return
        traffic = Traffic(case, seed=1)
        traffic.admit()
        traffic.admit()
        first, second = traffic.done
        traffic.step({first: 3, second: 5})
        before = traffic.store.usage()
        require(not traffic.store.reserve(second, 100 * SIZE.tokens), f"{100 * SIZE.tokens} tokens are reserved")
        require(traffic.store.usage() == before, f"refusing room changed {before} to {traffic.store.usage()}")
        traffic.step({second: 2, first: 1})

    def test_usage_never_exceeds_what_there_is(self, case: CacheCase) -> None:
        traffic = Traffic(case, seed=2)
        for _ in range(2 * SIZE.requests):
            traffic.admit()
            traffic.step(dict.fromkeys(traffic.done, 7))
            usage = traffic.store.usage()
            require(0 <= usage.tokens <= usage.tokens_total or not case.paged, f"usage says {usage}")
            require(usage.requests == len(traffic.done), f"{len(traffic.done)} requests are held, usage says {usage}")

    def test_what_fits_an_empty_store_can_be_reserved_and_no_more(self, case: CacheCase) -> None:
        for tokens in (1, SIZE.tokens // SIZE.requests, SIZE.tokens, SIZE.tokens + 1, 10 * SIZE.tokens):
            store = case.create()
            store.admit(0)
            said, done = store.fits(tokens), store.reserve(0, tokens)
            require(said == done, f"fits({tokens}) is {said}, but reserving them in an empty store gave {done}")
