"""The price of a recurrence over several chunks, and what it weighs."""

import pytest
import torch
from attn_core import Shape, configure, installed, state_bytes
from torch.utils.flop_counter import FlopCounterMode

NAMES = ["retnet", "gla", "deltanet", "kda", "lightning", "performer", "linear"]


def priced(name, tokens, chunk):
    mechanism = installed().mechanisms.get(name)
    return (
        mechanism,
        configure(mechanism, {"chunk": chunk}, hidden_size=16, num_heads=2),
        Shape(batch=2, query=tokens, key=tokens),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tokens", "chunk"), [(0, 8), (1, 8), (23, 4), (24, 8), (25, 5)])
def test_counted_flops_are_the_declared_ones_at_any_number_of_chunks(name, tokens, chunk):
    mechanism, config, shape = priced(name, tokens, chunk)
    with FlopCounterMode(display=False) as counter:
        mechanism.build(config)(torch.randn(2, tokens, 16))
    assert mechanism.cost(config, shape).flops == counter.get_total_flops()


@pytest.mark.parametrize("name", NAMES)
def test_the_price_grows_linearly_with_the_length(name):
    mechanism, config, _ = priced(name, 1, 64)
    lengths = [64 * 2**k for k in (6, 7)]
    short, long = (mechanism.cost(config, Shape(query=n, key=n)).flops for n in lengths)
    assert 1.99 < long / short < 2.01


@pytest.mark.parametrize("name", NAMES)
def test_cl_60_the_state_weighs_the_same_at_any_length(name):
    mechanism, config, _ = priced(name, 1, 64)
    weights = {state_bytes(mechanism.state(config), tokens=n, dtype="bfloat16") for n in (1, 100, 10**6)}
    assert len(weights) == 1


def test_ca_8_a_state_is_heads_times_key_size_times_value_size():
    for name, own in (("retnet", 8 * 16), ("lightning", 8 * 8), ("linear", 8 * 9), ("gla", 4 * 8)):
        mechanism, config, _ = priced(name, 1, 64)
        assert state_bytes(mechanism.state(config), tokens=9, dtype="float16") == 2 * own * 4


def test_ca_8_a_convolution_adds_its_last_inputs_in_the_type_of_the_model():
    mechanism, config, _ = priced("deltanet", 1, 64)
    assert state_bytes(mechanism.state(config), tokens=9, dtype="float16") == 2 * 8 * 8 * 4 + 3 * 2 * 24 * 2
