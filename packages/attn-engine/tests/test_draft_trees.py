"""Trees of draft tokens change the number of steps and nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from attn_core.errors import InvalidValue
from attn_engine import EngineConfig, Request, SamplingParams
from attn_engine.draft_tokens import PromptLookup, TokenTree, TokenTreeBuilder
from draft_models import DRAFTS, draft_of, similar
from hypothesis import given
from hypothesis import strategies as st
from serving import assert_empty, make_engine, run_all
from small_models import KINDS, VOCABULARY, Softmax, small_model
from test_speculative_decoding import CHI_SQUARE_999_OF_26, exact, ids_of, plainly, repeating, wordy

BRANCHING = ("paged", "window", "source", "replay")


def steps_of(engine, requests) -> int:
    for request in requests:
        engine.submit(request)
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("kind", "cache"),
    [(kind, cache) for kind in BRANCHING for cache in ("shared", "contiguous")] + [("window", "paged")],
)
def test_trees_change_no_token(kind, cache):
    """Whatever is remembered, and whether tokens are the likeliest or drawn."""
    model = repeating(kind)
    requests = wordy(model, 5)
    engine = make_engine(model, cache, max_num_batched_tokens=60, speculative_tree_width=3)
    assert engine.tree_unsupported_reason is None
    assert ids_of(run_all(engine, requests, every=2)) == plainly(model, requests)
    assert engine.stats().draft_tokens > engine.stats().accepted_tokens > 0
    assert_empty(engine)


@pytest.mark.parametrize("kind", ["paged", "slot"])
def test_trees_of_a_draft_change_no_token(kind):
    """The draft may remember what it likes: only the model that checks must hold a tree."""
    model = small_model("window")
    requests = wordy(model, 5)
    draft = draft_of(similar(model, DRAFTS[kind]), "shared")
    engine = make_engine(model, "shared", draft_model=draft, max_num_batched_tokens=80, speculative_tree_width=3)
    assert ids_of(run_all(engine, requests, every=2)) == plainly(model, requests)
    assert engine.stats().accepted_tokens > 0
    assert_empty(engine)
    assert draft._store.usage().requests == 0


def test_a_draft_whose_second_choice_is_right_saves_steps_in_a_tree_alone():
    """A chain follows the first choice; beside it a tree has the others too."""
    model = small_model("paged")
    requests = wordy(model, 4, seed=5, num_speculative_tokens=3)
    drafts = [draft_of(similar(model, lambda: (Softmax(),))) for _ in range(2)]
    chain, tree = (
        make_engine(model, "shared", draft_model=draft, speculative_tree_width=tree_width)
        for draft, tree_width in zip(drafts, (1, 4), strict=True)
    )
    steps = steps_of(chain, requests), steps_of(tree, requests)
    assert steps[1] < steps[0]
    assert tree.stats().generated_tokens == chain.stats().generated_tokens
    assert tree.stats().accepted_tokens > chain.stats().accepted_tokens


def test_preemption_and_little_room_change_nothing():
    """Trees take room only where there is some."""
    model = repeating("window")
    requests = wordy(model, 8, seed=3)
    engine = make_engine(model, "paged", tokens=112, max_num_batched_tokens=40, speculative_tree_width=3)
    assert ids_of(run_all(engine, requests)) == plainly(model, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().accepted_tokens > 0
    assert_empty(engine)


def test_penalties_logprobs_completions_and_ends_hold_in_trees():
    """What a token depends on is what was written, not what was drafted beside it."""
    model = repeating("paged")
    for options in (
        {"repetition_penalty": 1.1, "frequency_penalty": 0.3},
        {"top_logprobs": 2},
        {"ignore_eos": False, "min_new_tokens": 6},
        {"n": 2, "temperature": 0.4, "seed": 9},
    ):
        task = {"max_new_tokens": 14, "num_speculative_tokens": 4, **options}
        requests = [replace(request, params=SamplingParams(**task)) for request in wordy(model, 2, seed=6)]
        assert ids_of(run_all(make_engine(model, speculative_tree_width=3), requests)) == plainly(model, requests)


def test_samples_pass_a_chi_square_test_in_trees():
    """One random number for each position, whatever was drafted there."""
    model = repeating("paged")
    prompt, words = (1, 2, 3, 2, 1, 3, 1, 2), (1, 2, 3)
    only = {token: -100.0 for token in range(VOCABULARY) if token not in words} | dict.fromkeys(words, 50.0)
    task = SamplingParams(max_new_tokens=3, temperature=1.0, logit_bias=only, num_speculative_tokens=2, ignore_eos=True)
    requests = [Request(id=str(i), token_ids=prompt, params=task.replace(seed=i)) for i in range(800)]
    engine = make_engine(
        model,
        "shared",
        requests=64,
        tokens=96 * 64,
        max_num_batched_tokens=1024,
        max_queued_requests=2000,
        speculative_tree_width=3,
    )
    found = [tuple(outcome.ids) for outcome in run_all(engine, requests).values()]
    load = engine.stats()
    assert load.accepted_tokens > 100
    assert load.draft_tokens > 2 * load.accepted_tokens
    likely = {key: share * len(found) for key, share in exact(model, prompt, words, 3).items()}
    assert sum((found.count(key) - n) ** 2 / n for key, n in likely.items()) < CHI_SQUARE_999_OF_26


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BRANCHING])
def test_states_of_fixed_size_get_chains_of_draft_tokens_and_the_engine_says_so(kind, caplog):
    """A tree width above 1 is no error for such states, and the engine says that it has no effect."""
    model = repeating(kind)
    requests = wordy(model, 3)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(model, "shared", speculative_tree_width=3)
    assert "fixed size" in (engine.tree_unsupported_reason or "")
    assert "draft tokens form chains, not trees" in caplog.text
    assert ids_of(run_all(engine, requests)) == plainly(model, requests)
    assert engine.stats().accepted_tokens > 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_every_path_of_a_prompt_lookup_is_what_followed_the_same_tokens(tokens, most, tree_width):
    """No path is longer than was asked for, and there are no more of them."""
    tree = PromptLookup().draft(tokens, most, tree_width)
    parents = set(tree.parents)
    leaves = [node for node in range(len(tree)) if node not in parents]
    assert len(leaves) <= tree_width
    for leaf in leaves:
        path = [tree.tokens[node] for node in tree.path(leaf)]
        assert len(path) <= most
        starts = [i for i in range(1, len(tokens)) if tokens[i : i + len(path)] == path]
        assert any(tokens[i - 1] == tokens[-1] for i in starts)
    chain = PromptLookup().draft(tokens, most)
    assert not chain.is_tree
    assert tree.tokens[: len(chain)] == chain.tokens


def test_a_tree_grows_where_continuations_part():
    """What they have in common is there once, and what finds no room is left out."""
    growth = TokenTreeBuilder(5)
    assert growth.add_chain([1, 2, 3])
    assert growth.add_chain([1, 4])
    assert not growth.add_chain([1, 2])
    assert growth.add_chain([7, 8, 9])
    assert growth.tree == TokenTree((1, 2, 3, 4, 7), (-1, 0, 1, 0, -1))
    assert growth.tree.is_tree
    assert growth.tree.path(3) == [0, 3]
    assert (growth.tree.child(0, 4), growth.tree.child(-1, 4)) == (3, None)
    assert growth.tree.first(3) == TokenTree.chain([1, 2, 3])


@pytest.mark.parametrize("value", [0, -1, 9])
def test_a_tree_width_out_of_range_is_refused(value):
    """A width of 1 is a chain; 0 means nothing."""
    with pytest.raises(InvalidValue, match=r"^speculative_tree_width: .*1 to 8"):
        EngineConfig(speculative_tree_width=value)
