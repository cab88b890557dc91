"""Names and their owners."""

from dataclasses import dataclass

import pytest

from attn_core import Paper
from attn_core.errors import AmbiguousName, InvalidValue, UnknownName
from attn_core.plugins.registry import Registry


@dataclass(frozen=True)
class Thing:
    name: str
    summary: str = ""
    paper: Paper | None = None


@pytest.fixture
def registry():
    registry = Registry("mechanism")
    registry.register(Thing("mha"), "attn-variants")
    registry.register(Thing("twin"), "attn-one")
    registry.register(Thing("twin"), "attn-two")
    return registry


def test_a_short_name_finds_its_only_owner(registry):
    assert registry.full_name("mha") == "attn-variants/mha"
    assert registry.get("mha") is registry.get("attn-variants/mha")
    assert registry.owner("mha") == "attn-variants"


def test_a_name_with_two_owners_names_both_and_needs_the_full_name(registry):
    with pytest.raises(AmbiguousName, match="attn-one/twin, attn-two/twin"):
        registry.get("twin")
    assert registry.get("attn-two/twin") == Thing("twin")
    assert registry.owner("attn-two/twin") == "attn-two"


def test_a_built_in_name_means_the_built_in():
    registry = Registry("mechanism", built_in={"attn-own"})
    for owner in ("attn-other", "attn-own", "attn-third"):
        registry.register(Thing("mha", summary=owner), owner)
    assert registry.get("mha").summary == "attn-own"
    assert registry.get("attn-other/mha").summary == "attn-other"
    assert registry.names() == ["attn-other/mha", "attn-third/mha", "mha"]
    assert registry.overruled == dict.fromkeys(("attn-other/mha", "attn-third/mha"), "attn-own/mha")


def test_names_are_those_one_can_call(registry):
    assert registry.names() == ["attn-one/twin", "attn-two/twin", "mha"]
    assert len(registry) == len(list(registry)) == 3
    assert all(registry.get(name) for name in registry.names())


def test_an_unknown_name_is_answered_with_near_ones(registry):
    with pytest.raises(UnknownName, match="unknown mechanism 'mah'; did you mean 'mha'"):
        registry.get("mah")


@pytest.mark.parametrize(
    ("word", "names"),
    [("reformer", ["lsh"]), ("LSH", ["lsh", "locality"]), ("kitaev", ["lsh"]), ("form", []), ("(", []), ("", [])],
)
def test_items_are_found_by_whole_words_of_their_papers_too(word, names):
    registry = Registry("mechanism")
    paper = Paper(title="Reformer: The Efficient Transformer", authors="Kitaev, Kaiser, Levskaya", year=2020)
    registry.register(Thing("locality", summary="like lsh"), "attn-one")
    registry.register(Thing("lsh", summary="hashed", paper=paper), "attn-one")
    registry.register(Thing("mha"), "attn-one")
    assert registry.speaking_of(word) == names
    if names:
        with pytest.raises(UnknownName, match=f"did you mean '{names[0]}'"):
            registry.get(word)


def test_an_empty_registry_says_that_nothing_is_installed():
    with pytest.raises(UnknownName, match="no kernel is installed"):
        Registry("kernel").get("flash")


def test_one_owner_registers_a_name_once(registry):
    with pytest.raises(InvalidValue, match="attn-one registers the mechanism 'twin' twice"):
        registry.register(Thing("twin"), "attn-one")
    assert len(registry) == 3


@pytest.mark.parametrize("name", ["", "a/b", None])
def test_a_name_that_could_not_be_called_is_refused(registry, name):
    with pytest.raises(InvalidValue, match="without '/'"):
        registry.register(Thing(name), "attn-one")
