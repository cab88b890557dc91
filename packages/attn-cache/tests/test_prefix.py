"""Which beginnings are found again."""

from __future__ import annotations

from attn_cache.pages import PAGE
from attn_cache.prefix import Block, PrefixIndex

TOKENS = tuple(range(5 * PAGE))


def remembered(scope: str = "", tokens: tuple[int, ...] = TOKENS) -> PrefixIndex:
    index = PrefixIndex(PAGE)
    for number, (chain, block) in enumerate(index.follow(index.root(scope), tokens, len(tokens))):
        index.add(chain, Block(block, {None: number + 1}))
    return index


def pages(index: PrefixIndex, tokens: tuple[int, ...], scope: str = "") -> list[int]:
    return [block.pages[None] for _, block in index.find(tokens, scope)]


def test_the_longest_common_beginning_in_whole_blocks_is_found():
    index = remembered()
    assert pages(index, TOKENS) == [1, 2, 3, 4, 5]
    assert pages(index, TOKENS[: 3 * PAGE + 7]) == [1, 2, 3]
    assert pages(index, (*TOKENS[: 2 * PAGE + 3], 999, *TOKENS[2 * PAGE + 4 :])) == [1, 2]
    assert pages(index, TOKENS[: PAGE - 1]) == []


def test_equal_blocks_after_other_beginnings_are_not_taken_for_each_other():
    index = remembered()
    assert pages(index, TOKENS[PAGE:]) == []


def test_scopes_never_meet():
    assert pages(remembered("ann"), TOKENS, "ben") == []


def test_a_hash_that_is_right_for_other_tokens_is_not_trusted():
    index = remembered()
    for _, block in index.find(TOKENS, ""):
        block.tokens = tuple(token + 1 for token in block.tokens)
    assert pages(index, TOKENS) == []


def test_what_was_found_longest_ago_is_forgotten_first_and_of_what_was_found_the_end_before_the_beginning():
    index = remembered()
    index.find(TOKENS[: 2 * PAGE], "")
    assert [index.oldest().pages[None] for _ in range(5)] == [3, 4, 5, 2, 1]


def test_the_hashes_of_two_stores_differ():
    first, second = (
        next(iter(index.follow(index.root(""), TOKENS, PAGE)))[0].link for index in (remembered(), remembered())
    )
    assert first != second
