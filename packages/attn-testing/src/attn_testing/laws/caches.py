"""Laws of caches."""

from __future__ import annotations

from attn_testing.cache_subject import SIZE, CacheCase, Traffic
from attn_testing.law import Law, require

STEPS = 30


class ViewsEqual(Law):
    """Under random requests every view equals that of the reference store, a `DictionaryStore`."""

    def test_views_of_random_traffic_equal_those_of_the_oracle(self, case: CacheCase) -> None:
        for seed in range(2):
            traffic = Traffic(case, seed)
            for _ in range(STEPS):
                drive(traffic)


def drive(traffic: Traffic) -> None:
    """Sometimes admit or release a request, then step some: all by one token, or by random lengths."""
    chance = traffic.random
    if not traffic.done or chance.random() < 0.3:
        traffic.admit()
    elif chance.random() < 0.15:
        traffic.release(chance.choice(list(traffic.done)))
    if traffic.done:
        some = chance.sample(list(traffic.done), chance.randint(1, len(traffic.done)))
        decoding = chance.random() < 0.5
        traffic.step({name: 1 if decoding else chance.randint(1, 6) for name in some})


class RefusesWhenFull(Law):
    """A store without room for a request, or for its tokens, returns False and changes nothing."""

    def test_no_more_requests_are_admitted_than_there_are_places(self, case: CacheCase) -> None:
        traffic = Traffic(case, seed=0)
        for place in range(SIZE.requests):
            require(traffic.admit(), f"request {place + 1} of {SIZE.requests} is not admitted")
        before = traffic.store.usage()
        require(before.requests == before.requests_total == SIZE.requests, f"a store full of requests reports {before}")
        require(not traffic.admit(), f"request {SIZE.requests + 1} of {SIZE.requests} is admitted")
        require(
            traffic.store.usage() == before,
            f"refusing a request changed the usage from {before} to {traffic.store.usage()}",
        )
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
        require(
            not traffic.store.reserve(second, 100 * SIZE.tokens),
            f"{100 * SIZE.tokens} tokens are reserved in a store that is too small for them",
        )
        require(
            traffic.store.usage() == before,
            f"a refused reservation changed the usage from {before} to {traffic.store.usage()}",
        )
        traffic.step({second: 2, first: 1})

    def test_usage_never_exceeds_what_there_is(self, case: CacheCase) -> None:
        traffic = Traffic(case, seed=2)
        for _ in range(2 * SIZE.requests):
            traffic.admit()
            traffic.step(dict.fromkeys(traffic.done, 7))
            usage = traffic.store.usage()
            require(0 <= usage.tokens <= usage.tokens_total or not case.paged, f"the store reports {usage}")
            require(
                usage.requests == len(traffic.done),
                f"{len(traffic.done)} requests are admitted, the store reports {usage}",
            )

    def test_what_fits_an_empty_store_can_be_reserved_and_no_more(self, case: CacheCase) -> None:
        for tokens in (1, SIZE.tokens // SIZE.requests, SIZE.tokens, SIZE.tokens + 1, 10 * SIZE.tokens):
            store = case.create()
            store.admit(0)
            expected, reserved = store.fits(tokens), store.reserve(0, tokens)
            require(
                expected == reserved,
                f"fits({tokens}) is {expected}, but reserve() in an empty store returned {reserved}",
            )


CYCLES = 6


class ReleaseFreesAll(Law):
    """After all requests are released, the store is as if new, with the same room as before."""

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
            require(
                traffic.store.usage() == empty, f"after all requests are released the usage is {traffic.store.usage()}"
            )
        require(
            all(cycle == held[0] for cycle in held), "less could be reserved after requests were released than before"
        )


class LiveBytes(Law):
    """After every step a request takes exactly the bytes that the cache family declares for its states.

    For a lossless cache these are `state_bytes`.
    """

    def test_live_bytes_equal_the_formula(self, case: CacheCase) -> None:
        traffic = Traffic(case, seed=0)
        traffic.admit()
        traffic.admit()
        for length in (1, 4, 1, 1, 6, 2):
            traffic.step(dict.fromkeys(traffic.done, length))
            for name, tokens in traffic.done.items():
                source = traffic.sources[name]
                declared = case.family.bytes(case.specs, tokens=tokens, source=source, dtype=SIZE.dtype)
                held = traffic.store.live_bytes(name, tokens)
                require(
                    held == declared, f"after {tokens} tokens {held} bytes are held, the family declares {declared}"
                )


CACHE_LAWS: tuple[type[Law], ...] = (ViewsEqual, RefusesWhenFull, ReleaseFreesAll, LiveBytes)
