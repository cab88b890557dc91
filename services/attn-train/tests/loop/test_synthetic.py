"""Tasks that a rule makes: that each answer follows from its source."""

from __future__ import annotations

import pytest
import torch
from attn_train.data.synthetic import MAX_NEEDLE_WORDS, MAX_WORDS, TASKS, synthetic_pairs


def made(name, **lengths):
    return [(source.split(), target.split()) for source, target in synthetic_pairs(name, 300, 0, **lengths)]


@pytest.mark.parametrize("name", TASKS)
def test_equal_seeds_make_equal_pairs_and_no_side_is_empty(name):
    pairs = made(name)
    assert pairs == made(name)
    assert pairs != [(a.split(), b.split()) for a, b in synthetic_pairs(name, 300, 1)]
    assert all(source and target for source, target in pairs)


@pytest.mark.parametrize(
    ("name", "longest"), [("recall", MAX_WORDS), ("glossary", MAX_WORDS), ("needle", MAX_NEEDLE_WORDS)]
)
def test_sources_are_of_all_lengths_up_to_the_longest(name, longest):
    lengths = {len(source) for source, _ in made(name)}
    assert max(lengths) <= longest + (longest // 2 if name == "glossary" else 2)
    assert len(lengths) > 7


def test_what_was_stored_with_a_key_is_recalled():
    for source, target in made("recall"):
        *stored, asked = source
        memory = dict(zip(stored[::2], stored[1::2], strict=True))
        assert target == [memory[asked]]
        assert len(memory) == len(stored) // 2  # no key twice


def test_the_needle_is_the_word_behind_the_mark():
    for source, target in made("needle"):
        assert source[-1] == "?"
        assert source.count("needle") == 1
        assert target == [source[source.index("needle") + 1]]


def test_the_needle_lies_anywhere():
    places = {source.index("needle") / (len(source) - 2) for source, _ in made("needle", shortest=20, longest=20)}
    assert len(places) == 20


def test_a_glossary_translates_by_the_dictionary_of_its_text():
    for source, target in made("glossary"):
        colon = source.index(":")
        memory = dict(zip(source[:colon:2], source[1:colon:2], strict=True))
        assert target == [memory[key] for key in source[colon + 1 :]]


def test_swaps_multiply_matrices_of_permutations():
    swaps = {f"p{place}": torch.eye(3)[[1, 0, 2] if place == 0 else [0, 2, 1]] for place in range(2)}
    for source, target in made("swaps"):
        order = torch.arange(3.0)
        for word in source:
            order = swaps[word] @ order
        assert target == [f"t{int(thing)}" for thing in order]
