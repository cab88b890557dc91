"""The choices and the cost of a gateway's router: 100 replicas and 10,000 streams with simulated engines.

A trace of conversations with shared prefixes (system prompts with Zipf frequencies, growing turns) is routed by
cached prefixes with bounded load, to the less loaded of two replicas, and at random. Each replica keeps blocks of
prompts like a prefix cache with LRU eviction; streams last as many arrivals as keep 10,000 of them open.

    python benchmarks/router_cpu.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from attn_schema import ChatMessage, Prompt
from attn_serve.routing import PrefixRouter, block_hashes
from report import write_report

SYSTEM_PROMPTS = 200
TOKENS_OF_A_STREAM = 128
BLOCKS_OF_A_REPLICA = 20_000

Choose = Callable[[Sequence[bytes], dict[str, float]], str]


def trace(count: int, rng: random.Random) -> Iterator[Prompt]:
    """Requests of interleaved conversations: a system prompt and turns; each request repeats all earlier turns."""
    words = [f"{rng.getrandbits(32):08x}" for _ in range(2000)]
    systems = [" ".join(rng.choices(words, k=rng.randint(40, 400))) for _ in range(SYSTEM_PROMPTS)]
    shares = list(accumulate(1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)))
    going: deque[list[ChatMessage]] = deque()
    for _ in range(count):
        if going and rng.random() < 0.7:
            going.rotate(-rng.randrange(len(going)))
            turns = going.popleft()
            turns.append(ChatMessage(role="assistant", content=" ".join(rng.choices(words, k=60))))
        else:
            (system,) = rng.choices(systems, cum_weights=shares)
            turns = [ChatMessage(role="system", content=system)]
        turns.append(ChatMessage(role="user", content=" ".join(rng.choices(words, k=30))))
        yield Prompt(chat=tuple(turns))
        if len(turns) < 12:
            going.append(turns)
        while len(going) > 5000:
            going.popleft()


class Remembered:
    """The blocks that one replica's prefix cache holds, with LRU eviction."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def compute(self, blocks: Sequence[bytes]) -> int:
        """Cache the blocks of a prompt; returns how many of its first blocks were cached before."""
        found = next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > BLOCKS_OF_A_REPLICA:
            self._blocks.popitem(last=False)
        return found


def routed(name: str, choose: Choose, prompts: Sequence[Prompt], replicas: int, streams: int) -> dict[str, Any]:
    """Route all prompts with one policy and return its measurements."""
    loads = {str(number): 0.0 for number in range(replicas)}
    engines = {replica: Remembered() for replica in loads}
    open_streams: deque[str] = deque()
    hit = total = 0
    seconds, worst = 0.0, []
    for number, prompt in enumerate(prompts):
        begun = time.process_time()
        blocks = block_hashes(prompt, "ann")
        replica = choose(blocks, loads)
        seconds += time.process_time() - begun
        hit += engines[replica].compute(blocks)
        total += len(blocks)
        loads[replica] += 1
        open_streams.append(replica)
        if len(open_streams) > streams:
            loads[open_streams.popleft()] -= 1
            if number % 100 == 0:
                worst.append(max(loads.values()) / statistics.mean(loads.values()))
    return {
        "router": name,
        "replicas": replicas,
        "streams": streams,
        "requests": len(prompts),
        "blocks found [%]": round(100 * hit / total, 1),
        "CPU of a choice [us]": round(1e6 * seconds / len(prompts), 1),
        "CPU of a token [us]": round(1e6 * seconds / len(prompts) / TOKENS_OF_A_STREAM, 3),
        "largest load over mean, worst": round(max(worst), 3),
        "largest load over mean, median": round(statistics.median(worst), 3),
    }


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = list(trace(arguments.requests, random.Random(1)))
    rng = random.Random(2)

    def at_random(blocks: Sequence[bytes], loads: dict[str, float]) -> str:
        del blocks
        return rng.choice(list(loads))

    def less_loaded(blocks: Sequence[bytes], loads: dict[str, float]) -> str:
        del blocks
        return min(rng.sample(list(loads), 2), key=loads.__getitem__)

    ways: dict[str, Choose] = {
        "beginnings": PrefixRouter(random.Random(3)).choose,
        "less loaded of two": less_loaded,
        "random": at_random,
    }
    for name, choose in ways.items():
        yield routed(name, choose, prompts, arguments.replicas, arguments.streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    facts = {"question": "which replica remembers, how even is the load, and what does choosing cost?"}
    write_report("router-cpu", facts, rows(arguments), arguments.out)


if __name__ == "__main__":
    main()
