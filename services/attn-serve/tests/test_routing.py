"""Prompts go to replicas that remember their beginning, unless these have too much to do; tenants share nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from attn_schema import ChatMessage, Prompt
from attn_serve.routing import BLOCK_BYTES, LOAD_BOUND, MAX_BLOCKS, PrefixRouter, block_hashes

SYSTEM = "You are a helpful assistant. " * 20


def text(number: int, length: int = 4 * BLOCK_BYTES) -> Prompt:
    rng = random.Random(number)
    return Prompt(text="".join(rng.choice("abcdef ") for _ in range(length)))


def shared(one: Prompt, other: Prompt, tenants: tuple[str, str] = ("ann", "ann")) -> int:
    """Blocks that two prompts have in common."""
    pairs = zip(block_hashes(one, tenants[0]), block_hashes(other, tenants[1]), strict=False)
    return sum(a == b for a, b in pairs)


def test_prompts_share_the_blocks_before_they_differ() -> None:
    beginning = "x" * (3 * BLOCK_BYTES + 5)
    one, other = Prompt(text=beginning + "a" * 500), Prompt(text=beginning + "b" * 500)
    assert shared(one, other) == 3
    assert shared(one, one) == len(block_hashes(one, "ann")) == (len(beginning) + 501) // BLOCK_BYTES
    assert shared(one, other, ("ann", "ben")) == 0
    changed = Prompt(text="y" + beginning[1:] + "a" * 500)
    assert shared(one, changed) == 0


def test_kinds_of_prompts_share_nothing() -> None:
    said = Prompt(text="a" * 1000)
    ids = Prompt(token_ids=tuple(b"a" * 1000))
    chat = Prompt(chat=(ChatMessage(role="user", content="a" * 1000),))
    encoded = Prompt.of("a" * 1000, encoder_prompt="b")
    kinds = [said, ids, chat, encoded]
    assert [shared(one, other) for one in kinds for other in kinds if one is not other] == [0] * 12


def test_turns_of_a_conversation_share_what_was_said() -> None:
    turns = [ChatMessage(role="user", content="a" * 300), ChatMessage(role="assistant", content="b" * 300)]
    longer = [*turns, ChatMessage(role="user", content="c" * 300)]
    assert shared(Prompt.of(turns), Prompt.of(longer)) == len(block_hashes(Prompt.of(turns), "ann")) > 3


def test_a_prompt_of_any_length_costs_no_more_than_a_bound() -> None:
    assert len(block_hashes(Prompt(text="a" * 4_000_000), "")) == MAX_BLOCKS
    assert block_hashes(Prompt(text="short"), "") == []


def test_who_asks_again_comes_back_to_the_same_replica() -> None:
    router, loads = PrefixRouter(random.Random(1)), dict.fromkeys("abcd", 0.0)
    first = {number: router.choose(block_hashes(text(number), ""), loads) for number in range(40)}
    again = {number: router.choose(block_hashes(text(number), ""), loads) for number in range(40)}
    assert first == again
    assert (router.hits, router.misses) == (40, 40)
    assert len(set(first.values())) == 4
    gone = first[0]
    router.forget(gone)
    del loads[gone]
    assert router.choose(block_hashes(text(0), ""), loads) != gone


@pytest.mark.parametrize("replicas", [2, 10, 100])
def test_a_beginning_that_all_share_overloads_nobody(replicas: int) -> None:
    """One system prompt before everything: load stays within the bound, and later calls find it everywhere."""
    router = PrefixRouter(random.Random(2))
    loads = {str(number): 0.0 for number in range(replicas)}
    for number in range(60 * replicas):
        chosen = router.choose(block_hashes(Prompt(text=SYSTEM + str(number)), ""), loads)
        loads[chosen] += 1
    mean = sum(loads.values()) / replicas
    assert max(loads.values()) <= LOAD_BOUND * mean + 2
    if replicas <= 10:
        assert router.hits > 0.8 * 60 * replicas


def test_prompts_with_nothing_in_common_spread_as_two_choices_do() -> None:
    router = PrefixRouter(random.Random(3))
    loads = {str(number): 0.0 for number in range(50)}
    for number in range(5000):
        loads[router.choose(block_hashes(text(number, 300), ""), loads)] += 1
    assert max(loads.values()) <= 100 + 6  # of one choice at random the largest of 50 is about 125
    single = Counter(random.Random(3).choices(list(loads), k=5000))
    assert max(single.values()) > max(loads.values())


def test_without_a_replica_there_is_no_choice() -> None:
    with pytest.raises(LookupError):
        PrefixRouter().choose([], {})
