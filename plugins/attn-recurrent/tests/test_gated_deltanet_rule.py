import pytest
import torch
from attn_core import Shape, configure
from attn_core.errors import InvalidValue
from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.gated_deltanet.rule import Rule, by_chunks, weights
from attn_testing import Agreement
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

HEADS, KEY, VALUE = 2, 3, 4


def draw(tokens, seed=0, strongest=2.0):
    generator = torch.Generator().manual_seed(seed)

    def rows(size, make=torch.randn):
        return make(2, HEADS, tokens, size, generator=generator, dtype=torch.float64)

    keys = torch.nn.functional.normalize(rows(KEY), dim=-1)
    return Rule(rows(KEY), keys, rows(VALUE), -strongest * rows(1, torch.rand), rows(1, torch.rand))


def empty():
    return torch.zeros(2, HEADS, KEY, VALUE, dtype=torch.float64)


def by_tokens(rule, memory):
    """The paper's rule, one token after the other."""
    outs = []
    for t in range(rule.key.shape[2]):
        key = rule.key[:, :, t, :, None]
        forgotten = torch.eye(KEY, dtype=torch.float64) - rule.strength[:, :, t, None] * key @ key.mT
        kept = rule.decay[:, :, t, None].exp() * (forgotten @ memory)
        memory = kept + rule.strength[:, :, t, None] * key @ rule.value[:, :, t, None]
        outs.append((rule.query[:, :, t, None] @ memory)[:, :, 0])
    return torch.stack(outs, dim=2) if outs else rule.value, memory


@given(tokens=st.sampled_from([1, 2, 3, 7, 13, 31]), chunk=st.integers(1, 33), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_chunks_equal_the_equation_token_by_token(tokens, chunk, seed):
    rule = draw(tokens, seed)
    expected, memory = by_tokens(rule, empty())
    out, after = by_chunks(rule, empty(), chunk)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, memory, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights(rule) @ rule.value, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_chunks_are_those_of_the_equation(record_property):
    loops = Agreement(record_property, "gated_deltanet", paper="the rule, token by token")
    loops.functions(
        lambda *parts: by_chunks(Rule(*parts), empty(), 5)[0],
        lambda *parts: by_tokens(Rule(*parts), empty())[0],
        *draw(13),
        tolerance=1e-12,
    )


def test_without_decay_and_with_strength_one_a_key_replaces_what_was_held_for_it():
    rule = draw(7)
    key = torch.eye(KEY, dtype=torch.float64)[[0, 1, 2, 1, 0, 2, 2]].expand(2, HEADS, -1, -1)
    rule = rule._replace(query=key, key=key, decay=rule.decay * 0, strength=rule.strength * 0 + 1)
    out, memory = by_chunks(rule, empty(), 4)
    torch.testing.assert_close(out, rule.value)
    torch.testing.assert_close(memory, rule.value[:, :, [4, 3, 6]])


def test_no_strength_of_decay_overflows():
    rule = Rule(*(part.requires_grad_() for part in draw(20, strongest=1e6)))
    out, _ = by_chunks(rule, empty(), 8)
    torch.testing.assert_close(out, by_tokens(rule, empty())[0])
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(out.sum(), list(rule)))


@pytest.mark.parametrize(("tokens", "chunk"), [(23, 4), (24, 8), (5, 64)])
def test_the_price_counts_whole_and_broken_chunks(tokens, chunk):
    mechanism = GatedDeltaNet()
    config = configure(mechanism, {"chunk": chunk}, hidden_size=16, num_heads=2)
    with FlopCounterMode(display=False) as counter:
        mechanism.build(config)(torch.randn(3, tokens, 16))
    assert mechanism.cost(config, Shape(batch=3, query=tokens, key=tokens)).flops == counter.get_total_flops()


def test_nothing_in_is_nothing_out():
    mechanism = GatedDeltaNet()
    layer = mechanism.build(configure(mechanism, hidden_size=16, num_heads=2))
    assert layer(torch.zeros(2, 0, 16)).shape == (2, 0, 16)


@pytest.mark.parametrize("option", ["taps", "chunk", "value_size", "key_heads"])
def test_sizes_below_one_are_refused_by_name(option):
    with pytest.raises(InvalidValue, match=option):
        configure(GatedDeltaNet(), {option: 0}, hidden_size=8)


@pytest.mark.parametrize("given", [{"key_heads": 3}, {"norm_eps": -1.0}, {"norm_eps": "small"}])
def test_keys_that_do_not_divide_the_heads_and_bad_norms_are_refused_by_name(given):
    with pytest.raises(InvalidValue, match=next(iter(given))):
        configure(GatedDeltaNet(), given, hidden_size=16, num_heads=4)


def test_heads_that_share_a_key_equal_heads_with_copies_of_it():
    mechanism = GatedDeltaNet()
    few, full = (
        mechanism.build(configure(mechanism, {"key_heads": heads}, hidden_size=16, num_heads=4)).double()
        for heads in (2, 4)
    )
    weights = {name: value.clone() for name, value in few.state_dict().items()}
    for name in ("query", "key"):
        weights[f"{name}.weight"] = weights[f"{name}.weight"].view(2, 4, 16).repeat_interleave(2, 0).flatten(0, 1)
    query, key, value = weights["filters"].split([8, 8, 16])
    repeated = [part.view(2, 4, 4).repeat_interleave(2, 0).flatten(0, 1) for part in (query, key)]
    full.load_state_dict(weights | {"filters": torch.cat([*repeated, value])})
    rows = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(few(rows), full(rows), rtol=1e-12, atol=1e-12)
