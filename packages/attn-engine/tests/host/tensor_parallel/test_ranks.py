"""A model whose heads are split over processes gives the tokens of one process, greedy, sampled and by beams.

Each group of processes computes many cases, those of rank.py, and tells what it found in a file.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attn_core import Capability, installed
from attn_core.errors import UserError
from attn_core.splitting import require_split
from attn_engine.host.ranks import listen
from attn_models.attention import layer_attentions
from attn_schema.decoder import DecoderConfig

SECONDS = 250
"""How long a group may take; it is killed then."""

GROUPED = {"num_kv_heads": 2}
LEARNED = {"positions": "learned"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "mha": {"model": {"mechanism": "mha", "num_layers": 2, "attention_bias": True, "feed_forward_bias": True}},
    "gqa": {"model": {"mechanism": "gqa", "num_layers": 2, **GROUPED}},
    "mla": {"model": {"mechanism": "mla"}},
    "sliding window": {"model": {"mechanism": "sliding_window", "options": {"window": 9}}},
    "sinks": {"model": {"mechanism": "attention_sinks"}},
    "alibi": {"model": {"mechanism": "alibi", "positions": "none"}},
    "linear": {"model": {"mechanism": "linear", **LEARNED}},
    "gla": {"model": {"mechanism": "gla", **LEARNED}},
    "retnet": {"model": {"mechanism": "retnet"}},
    "replay": {"model": {"mechanism": "lsh_causal", **LEARNED}, "new_tokens": 4},
    "post-norm": {"model": {"mechanism": "gqa", "norm_place": "post", "feed_forward": "gelu"}},
    "parallel": {"model": {"mechanism": "gqa", "norm_place": "parallel"}},
    "experts": {"model": {"mechanism": "mha", **EXPERTS}},
    "shared keys and values": {"model": {"mechanism": "gqa", "num_layers": 4, "kv_sharing": "cla:2"}},
    "one key/value head": {"model": {"mechanism": "mqa", "num_kv_heads": 1}},
    "preemption": {
        "model": {"mechanism": "gqa"},
        "cache_tokens": 144,
        "new_tokens": 16,
        "engine": {"kv_cache": "paged"},
    },
    "contiguous": {"model": {"mechanism": "gqa"}, "engine": {"kv_cache": "contiguous"}},
    "int8 cache": {"model": {"mechanism": "gqa"}, "engine": {"kv_cache": "int8"}},
    "kivi cache": {"model": {"mechanism": "gqa"}, "engine": {"kv_cache": "kivi4"}},
    "prompt lookup": {"model": {"mechanism": "gqa"}, "engine": {"num_speculative_tokens": 3}},
    "draft model": {"model": {}, "draft": True},
    "draft trees": {"model": {"mechanism": "gqa"}, "draft": True, "engine": {"speculative_tree_width": 2}},
    "drafts and states of fixed size": {"model": {"mechanism": "linear", **LEARNED}, "draft": True},
}
ON_FOUR = ("mha", "linear", "one key/value head")
WHOLE_ON_EACH = {"replay", "mla", "one key/value head"}
"""Cases whose ranks hold the same states: what they remember is no head's own."""


def run_group(folder, size, cases):
    """What the ranks found for each case, by name."""
    (folder / "cases.json").write_text(json.dumps(cases))
    store, address = listen("127.0.0.1")
    said = [(folder / f"{size}.{index}.stderr").open("wb") for index in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank.py")), str(index), str(size), address, str(folder)],
            stderr=said[index],
        )
        for index in range(size)
    ]
    try:
        codes = waited(ranks)
    finally:
        for rank, file in zip(ranks, said, strict=True):
            rank.kill()
            rank.wait()
            file.close()
    del store
    assert codes == [0] * size, [Path(file.name).read_text()[-3000:] for file in said]
    return json.loads((folder / f"found{size}.json").read_text())


def waited(ranks):
    """The codes of all ranks, once all have ended or one has failed; None of those that run."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [rank.poll() for rank in ranks]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
    return codes


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_group(tmp_path_factory.mktemp("two"), 2, CASES)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    cases = {name: {"model": CASES[name]["model"] | {"num_layers": 1}, "new_tokens": 3} for name in ON_FOUR}
    return run_group(tmp_path_factory.mktemp("four"), 4, cases)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_tokens_of_one_process(two, case):
    assert two[case]["ranks"] == two[case]["alone"]
    assert two[case]["lost"] == []


@pytest.mark.parametrize("case", ON_FOUR)
def test_four_ranks_give_the_tokens_of_one_process(four, case):
    assert four[case]["ranks"] == four[case]["alone"]
    assert four[case]["lost"] == []


def test_the_cases_do_what_their_names_say(two):
    assert two["preemption"]["stats"]["preemptions"] > 0
    assert two["draft model"]["stats"]["accepted_tokens"] > 0
    assert two["gqa"]["stats"]["cached_tokens"] >= 16
    assert len({tuple(tokens) for tokens in two["gqa"]["ranks"].values()}) > 3


@pytest.mark.parametrize("case", sorted(set(CASES) - WHOLE_ON_EACH))
def test_each_of_two_ranks_holds_half_of_the_cache(two, case):
    whole, part = two[case]["bytes"]
    assert part * 2 == whole


def test_each_of_four_ranks_holds_a_quarter_of_the_cache(four):
    for case in set(ON_FOUR) - WHOLE_ON_EACH:
        whole, part = four[case]["bytes"]
        assert part * 4 == whole


@pytest.mark.cluster
def test_every_mechanism_that_splits_its_heads_serves_on_two_ranks(tmp_path):
    cases = {name: {"model": values, "new_tokens": 3} for name, values in splittable().items()}
    assert len(cases) > 50
    found = run_group(tmp_path, 2, cases)
    assert {name: case["ranks"] for name, case in found.items()} == {
        name: case["alone"] for name, case in found.items()
    }


def splittable():
    """Sizes of a decoder for each causal mechanism that two ranks can share."""
    found = {}
    for mechanism in installed().mechanisms:
        for positions in ("rotary", "learned"):
            values = {"mechanism": mechanism.name, "positions": positions}
            config = {"vocab_size": 48, "max_seq_len": 96, "hidden_size": 32, "num_layers": 1, "num_heads": 4}
            try:
                (attention,) = layer_attentions(DecoderConfig(**config, **values))
                require_split(attention.mechanism, attention.config, 2)
            except UserError:
                continue
            if mechanism.can(Capability.CAUSAL):
                found.setdefault(mechanism.name, values)
    return found
