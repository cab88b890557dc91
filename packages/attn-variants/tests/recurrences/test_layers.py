"""What single mechanisms promise beyond the laws of all."""

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import Incompatible, InvalidValue
from attn_variants.mechanisms.decay_layers import log_retention, slopes_of
from attn_variants.mechanisms.recurrence_layers import Places, Projections
from torch.nn.functional import silu

CAUSAL_ONLY = ["retnet", "gla", "deltanet", "kda", "lightning"]
MECHANISMS = [*CAUSAL_ONLY, "performer", "linear"]


def made(name, options=None, **shared):
    torch.manual_seed(0)
    mechanism = installed().mechanisms.get(name)
    return mechanism.build(
        configure(mechanism, options or {}, **{"hidden_size": 16, "num_heads": 2, **shared})
    ).double()


def rows(tokens, batch=2):
    return torch.randn(batch, tokens, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_decays_of_retention_are_those_of_the_paper():
    exact = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(8)], dtype=torch.float64)
    assert torch.allclose(log_retention(8, exact).exp()[:, 0], exact, rtol=0, atol=1e-15)


def test_the_slopes_of_lightning_attention_are_those_of_alibi():
    like = torch.zeros(1, dtype=torch.float64)
    assert slopes_of(8, like)[:, 0].tolist() == [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_retention_is_the_loop_of_the_paper(agrees, eps):
    layer = made("retnet", {"base": None, "chunk": 4, "norm_eps": eps})
    given = rows(11)
    query, key, value = (linear(given).unflatten(-1, (2, -1)) for linear in (layer.query, layer.key, layer.value))
    out = torch.zeros_like(value)
    for head in range(2):
        memory = torch.zeros(2, 8, 16, dtype=torch.float64)
        for t in range(11):
            memory = (1 - 2.0 ** (-5 - head)) * memory + key[:, t, head, :, None] / 8**0.5 * value[:, t, head, None]
            out[:, t, head] = torch.einsum("bk,bkv->bv", query[:, t, head], memory)
    out = out / (out.square().mean(-1, keepdim=True) + eps).sqrt()
    expected = layer.output(silu(layer.gate(given)) * out.flatten(-2))
    agrees("retnet", paper="the equations, token by token").outputs(layer(given), expected, 1e-12)


def test_rotary_positions_of_retention_depend_on_distances_only():
    layer = made("retnet")
    given = rows(6)
    at = torch.arange(6)[None]
    near, far = (
        layer._steps(Projections(layer, given), Places(places, 2000), None, None)[0] for places in (at, at + 1000)
    )
    scores = [torch.einsum("bqhd,bkhd->bhqk", steps.query, steps.key) for steps in (near, far)]
    torch.testing.assert_close(*scores, rtol=1e-9, atol=1e-9)
    plain = made("retnet", {"base": None})
    plain.load_state_dict(layer.state_dict())
    assert not torch.allclose(plain(given), layer(given))


def test_a_gate_of_gla_that_is_open_forgets_nothing():
    layer = made("gla", {"chunk": 4})
    with torch.no_grad():
        layer.fade[1].weight.zero_()
        layer.fade[1].bias.fill_(1e3)
    query, key = (linear(rows(9)).unflatten(-1, (2, -1)) for linear in (layer.query, layer.key))
    pairs = torch.einsum("bqhd,bkhd->bhqk", query, key).tril() / query.shape[-1] ** 0.5
    torch.testing.assert_close(layer.weights(rows(9)), pairs, rtol=1e-12, atol=1e-12)


def test_kda_whose_memory_does_not_fade_is_deltanet(agrees):
    kda, delta = made("kda"), made("deltanet")
    with torch.no_grad():
        kda.rate.fill_(-800.0)
    shared = delta.state_dict()
    kda.load_state_dict(shared, strict=False)
    same = agrees("kda", identity="without decay it is deltanet")
    same.outputs(kda.weights(rows(9)), delta.weights(rows(9)), 1e-12)


def test_a_convolution_of_one_tap_of_one_is_none():
    convolved, plain = made("deltanet", {"convolution": 1}), made("deltanet", {"convolution": 0})
    with torch.no_grad():
        convolved.convolution.weight.fill_(1.0)
    convolved.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(convolved(rows(9)), plain(rows(9)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*MECHANISMS, "efficient"])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_any_length_is_taken_and_gives_as_many_rows(name, tokens):
    layer = made(name, causal=name != "efficient")
    out = layer(rows(tokens))
    assert out.shape == (2, tokens, 16)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", MECHANISMS)
def test_chunks_change_the_speed_only(name):
    layers = [made(name, {"chunk": chunk}) for chunk in (1, 5, 64)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    outs = [layer(rows(13)) for layer in layers]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_weights_are_those_of_what_is_read(name):
    layer = made(name, {"chunk": 4})
    seen = {}
    finish = layer.finish
    layer.finish = lambda out, given: (seen.update(out=out), finish(out, given))[1]
    layer(rows(9))
    steps, _ = layer.read(rows(9), None, None)
    read = torch.einsum("bhqk,bkhv->bqhv", layer.weights(rows(9)), steps.value)
    if name in {"performer", "linear"}:
        out = seen["out"][..., :-1] / seen["out"][..., -1:]
        torch.testing.assert_close(out, read[..., :-1], rtol=1e-4, atol=1e-6)
    else:
        torch.testing.assert_close(seen["out"], read, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_a_recurrence_in_time_refuses_to_look_ahead_by_its_name(name):
    with pytest.raises(InvalidValue, match=rf"causal: False.*'{name}'"):
        made(name, causal=False)


def test_efficient_attention_refuses_to_be_causal():
    with pytest.raises(InvalidValue, match=r"causal: True.*'efficient'"):
        made("efficient", causal=True)


@pytest.mark.parametrize("name", ["gla", "deltanet", "kda", "lightning", "performer", "efficient"])
def test_rotary_positions_are_refused_where_they_mean_nothing(name):
    from attn_core import Rotary

    with pytest.raises(Incompatible, match=name):
        made(name, causal=name != "efficient", rotary=Rotary())


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("retnet", "chunk", 0),
        ("retnet", "base", 0.5),
        ("gla", "rank", 0),
        ("gla", "temperature", 0.0),
        ("deltanet", "convolution", -1),
        ("kda", "key_size", 0),
        ("lightning", "value_size", 0),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(name, option, value):
    with pytest.raises(InvalidValue, match=option):
        made(name, {option: value})


def test_an_odd_rotary_size_is_refused():
    with pytest.raises(InvalidValue, match="even number"):
        made("retnet", {"key_size": 5})
