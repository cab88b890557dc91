"""A layer sees what it wrote, and nothing else."""

from __future__ import annotations

from attn_testing.cache_subject import CacheCase
from attn_testing.law import Law
from attn_testing.traffic import Traffic

STEPS = 30


class ViewsEqual(Law):
    """Under random traffic every view equals that of a store which keeps everything in dictionaries."""

    def test_views_of_random_traffic_equal_those_of_the_oracle(self, case: CacheCase) -> None:
        for seed in range(2):
            traffic = Traffic(case, seed)
            for _ in range(STEPS):
                drive(traffic)


def drive(traffic: Traffic) -> None:
    """Admit or release a request at times, then step some: all by one token, or by various lengths."""
    chance = traffic.random
    if not traffic.done or chance.random() < 0.3:
        traffic.admit()
    elif chance.random() < 0.15:
        traffic.release(chance.choice(list(traffic.done)))
    if traffic.done:
        some = chance.sample(list(traffic.done), chance.randint(1, len(traffic.done)))
        decoding = chance.random() < 0.5
        traffic.step({name: 1 if decoding else chance.randint(1, 6) for name in some})
