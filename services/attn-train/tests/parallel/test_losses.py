"""Several workers find the losses of one: under every parallelism, for every group of mechanisms and kind of model."""

import pytest
from groups import LOSSES, beside_one, require_equal_losses

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
LLAMA = {"mechanism": "gqa", "num_kv_heads": 2, "norm": "rms", "feed_forward": "swiglu"}
ENCODER_DECODER = {"family": "transformer", "max_encoder_len": 16, "intermediate_size": 32}
PAIRS = {"model": ENCODER_DECODER, "data": {"dataset": "pairs.tsv", "tokenizer": "word"}}
MASKED = {"model": {"family": "masked_lm", "intermediate_size": 32}}

OF_TWO = {
    "copies": ({"model": LLAMA}, {}),
    "shards": ({"model": LLAMA}, {"dp_shard": 2}),
    "heads": ({"model": LLAMA}, {"tp": 2}),
    "tokens": ({"model": LLAMA}, {"cp": 2}),
    "tokens-window": ({"model": {"mechanism": "sliding_window", "options": {"window": 5}}}, {"cp": 2}),
    "accumulated": ({"model": LLAMA, "optimizer": {"gradient_accumulation_steps": 2}}, {"dp_shard": 2}),
    "latents-heads": ({"model": {"mechanism": "mla", "options": {"latent": 8, "rotary_size": 4}}}, {"tp": 2}),
    "recurrence-heads": ({"model": {"mechanism": "kda"}}, {"tp": 2}),
    "recurrence-shards": ({"model": {"mechanism": "retnet"}}, {"dp_shard": 2}),
    "shared-kv-heads": ({"model": {"num_layers": 2, "kv_sharing": "cla:2"}}, {"tp": 2}),
    "experts-copies": ({"model": {**MOE, "routing": "mixtral"}}, {}),
    "experts-shards": ({"model": {**MOE, "routing": "deepseek_v3"}}, {"dp_shard": 2}),
    "experts-heads": ({"model": {**MOE, "routing": "switch"}}, {"tp": 2}),
    "encoder-decoder-copies": (PAIRS, {}),
    "encoder-decoder-shards": (PAIRS, {"dp_shard": 2}),
    "encoder-decoder-heads": (PAIRS, {"tp": 2}),
    "masked-copies": (MASKED, {}),
    "masked-shards": (MASKED, {"dp_shard": 2}),
    "masked-heads": (MASKED, {"tp": 2}),
}

OF_FOUR = {
    "hybrid": ({"model": LLAMA}, {"dp_shard": 2}),
    "shards-heads": ({"model": LLAMA}, {"dp_shard": 2, "tp": 2}),
    "tokens-heads": ({"model": LLAMA}, {"cp": 2, "tp": 2}),
    "shards-tokens": ({"model": LLAMA}, {"dp_shard": 2, "cp": 2}),
    "experts-shards-heads": ({"model": {**MOE, "routing": "mixtral"}}, {"dp_shard": 2, "tp": 2}),
    "encoder-decoder-hybrid": (PAIRS, {"dp_shard": 2}),
}

DEFAULT = ("copies", "shards", "heads", "tokens", "recurrence-heads", "experts-shards", "encoder-decoder-heads")
"""Those of two workers that run by default; all are marked slow, as there are hundreds of steps of each."""


def located(cases, folder):
    """The cases with the paths of their data."""
    found = {}
    for name, (parts, layout) in cases.items():
        data = parts.get("data")
        found[name] = ({**parts, "data": {**data, "dataset": str(folder / data["dataset"])}} if data else parts, layout)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return beside_one(folder, 2, located({name: OF_TWO[name] for name in DEFAULT}, folder), "float64")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    cases = {name: OF_FOUR[name] for name in ("hybrid", "shards-heads", "tokens-heads")}
    return beside_one(folder, 4, located(cases, folder), "float32")


@pytest.mark.parametrize("name", DEFAULT)
def test_two_workers_find_the_losses_of_one(two, name):
    require_equal_losses(two, name, LOSSES["float64"])


@pytest.mark.parametrize("name", ["hybrid", "shards-heads", "tokens-heads"])
def test_four_workers_find_the_losses_of_one(four, name):
    require_equal_losses(four, name, LOSSES["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOSSES)
@pytest.mark.parametrize(("workers", "cases"), [(2, OF_TWO), (4, OF_FOUR)], ids=["two", "four"])
def test_losses_stay_those_of_one_worker_over_two_hundred_steps(tmp_path, workers, cases, dtype):
    found = beside_one(tmp_path, workers, located(cases, tmp_path), dtype, steps=200)
    for name in cases:
        require_equal_losses(found, name, LOSSES[dtype])
