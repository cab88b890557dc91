import pytest
import torch
from attn_core import Shape, configure
from attn_core.errors import InvalidValue
from attn_recurrent.mamba2 import Mamba2
from attn_recurrent.mamba2.duality import System, by_chunks, weights
from attn_testing import Agreement
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

HEADS, GROUPS, STATE, HEAD = 4, 2, 3, 5


def draw(tokens, seed=0, strongest=2.0):
    generator = torch.Generator().manual_seed(seed)

    def rows(heads, size, make=torch.randn):
        return make(2, heads, tokens, size, generator=generator, dtype=torch.float64)

    return System(rows(GROUPS, STATE), rows(GROUPS, STATE), rows(HEADS, HEAD), -strongest * rows(HEADS, 1, torch.rand))


def empty():
    return torch.zeros(2, HEADS, STATE, HEAD, dtype=torch.float64)


def by_tokens(system, memory):
    """The state space model, one token after the other, each head with the B and C of its group."""
    groups, outs = [head * GROUPS // HEADS for head in range(HEADS)], []
    for t in range(system.value.shape[2]):
        new = system.writing[:, groups, t, :, None] * system.value[:, :, t, None]
        memory = system.decay[:, :, t, :, None].exp() * memory + new
        outs.append(torch.einsum("bhs,bhsv->bhv", system.reading[:, groups, t], memory))
    return torch.stack(outs, 2) if outs else system.value, memory


@given(tokens=st.sampled_from([0, 1, 2, 3, 7, 13, 31]), chunk=st.integers(1, 33), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_chunks_equal_the_state_space_model_token_by_token(tokens, chunk, seed):
    system = draw(tokens, seed)
    expected, memory = by_tokens(system, empty())
    out, after = by_chunks(system, empty(), chunk)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, memory, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights(system) @ system.value, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_chunks_are_those_of_the_state_space_model(record_property):
    loops = Agreement(record_property, "mamba2", paper="the state space model, token by token")
    loops.functions(
        lambda *parts: by_chunks(System(*parts), empty(), 5)[0],
        lambda *parts: by_tokens(System(*parts), empty())[0],
        *draw(13),
        tolerance=1e-12,
    )


def test_without_decay_it_is_linear_attention():
    system = draw(9)
    plain = system._replace(decay=torch.zeros_like(system.decay))
    pairs = (system.reading @ system.writing.mT).tril().repeat_interleave(HEADS // GROUPS, 1)
    torch.testing.assert_close(by_chunks(plain, empty(), 4)[0], pairs @ system.value, rtol=1e-12, atol=1e-12)


def test_the_weights_of_the_layer_are_those_of_x():
    torch.manual_seed(0)
    mechanism = Mamba2()
    layer = mechanism.build(configure(mechanism, {"state_size": 3}, hidden_size=8, num_heads=2)).double()
    rows = torch.randn(1, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        gate, mixed, *_ = layer._projected(rows, None)
        x = layer._convolved(mixed, None, None)[0][..., : layer.config.inner].unflatten(-1, (2, -1)).transpose(1, 2)
        read = layer.weights(rows) @ x + layer.skip[:, None, None] * x
        out = layer._out(read.transpose(1, 2).flatten(-2), gate, rows.dtype)
    torch.testing.assert_close(out, layer(rows))


@pytest.mark.parametrize(("tokens", "chunk"), [(23, 4), (24, 8), (5, 64), (0, 8)])
def test_the_price_counts_whole_and_broken_chunks(tokens, chunk):
    mechanism = Mamba2()
    config = configure(mechanism, {"chunk": chunk, "groups": 2, "state_size": 6}, hidden_size=16, num_heads=4)
    with FlopCounterMode(display=False) as counter:
        mechanism.build(config)(torch.randn(3, tokens, 16))
    assert mechanism.cost(config, Shape(batch=3, query=tokens, key=tokens)).flops == counter.get_total_flops()


@pytest.mark.parametrize(
    ("option", "value"), [("taps", 0), ("chunk", 0), ("state_size", 0), ("expand", 0), ("groups", 3)]
)
def test_sizes_that_cannot_be_are_refused_by_name(option, value):
    with pytest.raises(InvalidValue, match=option):
        configure(Mamba2(), {option: value}, hidden_size=8, num_heads=4)
