"""Which beginnings are found again."""

from __future__ import annotations

from attn_cache.block_table import BLOCK_SIZE
from attn_cache.prefix_cache import CachedBlock, PrefixIndex

TOKENS = tuple(range(5 * BLOCK_SIZE))


def remembered(scope: str = "", tokens: tuple[int, ...] = TOKENS) -> PrefixIndex:
    index = PrefixIndex(BLOCK_SIZE)
    for number, (prefix, block) in enumerate(index.follow(index.root(scope), tokens, len(tokens))):
        index.add(prefix, CachedBlock(block, {None: number + 1}))
    return index


def cached(index: PrefixIndex, tokens: tuple[int, ...], scope: str = "") -> list[int]:
    return [block.blocks[None] for _, block in index.find(tokens, scope)]


def test_the_longest_common_beginning_in_whole_blocks_is_found():
    index = remembered()
    assert cached(index, TOKENS) == [1, 2, 3, 4, 5]
    assert cached(index, TOKENS[: 3 * BLOCK_SIZE + 7]) == [1, 2, 3]
    assert cached(index, (*TOKENS[: 2 * BLOCK_SIZE + 3], 999, *TOKENS[2 * BLOCK_SIZE + 4 :])) == [1, 2]
    assert cached(index, TOKENS[: BLOCK_SIZE - 1]) == []


def test_equal_blocks_after_other_beginnings_are_not_taken_for_each_other():
    index = remembered()
    assert cached(index, TOKENS[BLOCK_SIZE:]) == []


def test_scopes_never_meet():
    assert cached(remembered("ann"), TOKENS, "ben") == []


def test_a_hash_that_is_right_for_other_tokens_is_not_trusted():
    index = remembered()
    for _, block in index.find(TOKENS, ""):
        block.tokens = tuple(token + 1 for token in block.tokens)
    assert cached(index, TOKENS) == []


def test_what_was_found_longest_ago_is_forgotten_first_and_of_what_was_found_the_end_before_the_beginning():
    index = remembered()
    index.find(TOKENS[: 2 * BLOCK_SIZE], "")
    assert [index.evict().blocks[None] for _ in range(5)] == [3, 4, 5, 2, 1]


def test_the_hashes_of_two_stores_differ():
    first, second = (
        next(iter(index.follow(index.root(""), TOKENS, BLOCK_SIZE)))[0].digest for index in (remembered(), remembered())
    )
    assert first != second
