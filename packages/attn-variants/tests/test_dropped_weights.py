"""Layers that drop weights in training: unbiased, seeded by torch, refused where there is nothing to drop."""

import copy

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import Incompatible
from torch._dynamo.testing import CompileCounter

WIDTH, TOKENS = 16, 8


def layer(name, dropout, **options):
    mechanism = installed().mechanisms.get(name)
    torch.manual_seed(0)
    return mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=4, dropout=dropout)).double()


def rows(tokens=TOKENS):
    return torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", ["mha", "gqa", "mla", "shaw", "sigmoid", "attention_sinks"])
def test_the_mean_over_many_draws_approaches_what_nothing_dropped_gives(name):
    dropped, draws = layer(name, 0.3), 300
    with torch.no_grad():
        # Every sequence of a batch has draws of its own.
        out = dropped.train()(rows().expand(draws, -1, -1))
        expected = dropped.eval()(rows())
    deviation = out.std(0) / draws**0.5
    assert ((out.mean(0) - expected[0]).abs() <= 6 * deviation + 1e-12).all()
    assert (deviation[1:] > 0).all()


def test_a_layer_with_dropout_0_is_the_layer_without_and_draws_nothing():
    plain, none = layer("mha", 0.0).train(), layer("mha", 0).train()
    before = torch.random.get_rng_state()
    assert torch.equal(plain(rows()), none(rows()))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_copy_of_a_layer_computes_what_the_layer_does():
    found = layer("mha", 0.5)
    found(rows())
    torch.manual_seed(1)
    expected = found(rows())
    torch.manual_seed(1)
    assert torch.equal(copy.deepcopy(found)(rows()), expected)


def test_packed_texts_lose_other_weights_each_and_evaluation_none():
    found = layer("gqa", 0.5)
    twice = rows().repeat(1, 2, 1)
    one, other = found.train()(twice, lengths=(TOKENS, TOKENS)).split(TOKENS, 1)
    assert not torch.equal(one, other)
    one, other = found.eval()(twice, lengths=(TOKENS, TOKENS)).split(TOKENS, 1)
    assert torch.equal(one, other)


def test_global_rows_of_longformer_are_dropped_too():
    found = layer("longformer", 0.5, window=2, global_positions=(0,))
    assert not torch.equal(found.train()(rows())[:, 0], found.eval()(rows())[:, 0])


@pytest.mark.parametrize("name", ["linear", "retnet", "deltanet", "performer", "linformer", "lstmn", "h2o"])
def test_mechanisms_without_weights_say_why_they_refuse(name):
    with pytest.raises(Incompatible, match=rf"{name}.* without attention weights.* must be 0, not 0\.1"):
        layer(name, 0.1)
    mechanism = installed().mechanisms.get(name)
    with pytest.raises(Incompatible, match="without attention weights"):
        mechanism.build(mechanism.Config(hidden_size=WIDTH, num_heads=4, dropout=0.1))


def test_a_compiled_layer_drops_what_the_layer_does_and_is_compiled_once_for_all_seeds():
    found, counter = layer("mha", 0.5), CompileCounter()
    compiled, graphs = torch.compile(found, backend=counter, fullgraph=True), []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        expected = found(rows())
        torch.manual_seed(seed)
        assert torch.equal(compiled(rows()), expected)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[2]
