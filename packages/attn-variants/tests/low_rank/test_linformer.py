import copy

import pytest
import torch
from attn_core import Shape, configure, installed
from attn_core.errors import Incompatible, InvalidValue, UserError, WrongState

WIDTH, HEADS, LENGTH = 12, 3, 9


def softmax_attention(build, layer, rows):
    full = build("mha", hidden_size=WIDTH, num_heads=HEADS, causal=False)
    full.load_state_dict({name: weight for name, weight in layer.state_dict().items() if not name.startswith("inner")})
    return full(rows)


def test_where_the_projections_are_the_identity_it_is_softmax_attention(build, agrees):
    layer = build("linformer", {"rank": LENGTH, "length": LENGTH}, hidden_size=WIDTH, num_heads=HEADS, causal=False)
    with torch.no_grad():
        for weight in layer.inner.parameters():
            weight.copy_(torch.eye(LENGTH)[None])
    rows = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    expected = softmax_attention(build, layer, rows)
    agrees("linformer", identity="projections by the identity are mha").outputs(layer(rows), expected, 1e-13)


@pytest.mark.parametrize("sharing", ["none", "heads", "keys_values", "layers"])
def test_each_output_equals_the_equation_in_loops(build, agrees, sharing):
    options = {"rank": 4, "length": LENGTH, "sharing": sharing}
    layer = build("linformer", options, hidden_size=WIDTH, num_heads=HEADS, causal=False)
    rows = torch.randn(6, WIDTH, dtype=torch.float64)
    inner, size, tokens = layer.inner, WIDTH // HEADS, 6
    out = torch.zeros(tokens, WIDTH, dtype=torch.float64)
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        query, key, value = (rows @ linear.weight[part].T.detach() for linear in (layer.query, layer.key, layer.value))
        own = head if sharing == "none" else 0
        into_key = inner.key_weight[own].detach()
        into_value = into_key if sharing in {"keys_values", "layers"} else inner.value_weight[own].detach()
        keys = torch.stack([sum(into_key[n, k] * key[n] for n in range(tokens)) for k in range(4)])
        values = torch.stack([sum(into_value[n, k] * value[n] for n in range(tokens)) for k in range(4)])
        for token in range(tokens):
            out[token, part] = (keys @ query[token] / size**0.5).softmax(0) @ values
    loops = agrees("linformer", paper="equation 7 in loops")
    loops.outputs(layer(rows[None])[0], out @ layer.output.weight.T, 1e-13)


def test_more_tokens_than_it_is_built_for_are_refused(build):
    layer = build("linformer", {"length": 4}, hidden_size=WIDTH, num_heads=HEADS, causal=False)
    with pytest.raises(InvalidValue, match="at most 4"):
        layer(torch.randn(1, 5, WIDTH, dtype=torch.float64))


def test_a_causal_model_is_told_that_there_is_no_causal_form(build):
    with pytest.raises(InvalidValue, match=r"causal: True .*allowed: False: mechanism 'linformer'"):
        build("linformer", hidden_size=WIDTH, num_heads=HEADS, causal=True)


@pytest.mark.parametrize("options", [{"rank": 0}, {"length": 0}, {"sharing": "models"}])
def test_a_bad_option_is_refused(options):
    with pytest.raises(UserError):
        configure(installed().mechanisms.get("linformer"), options, hidden_size=WIDTH, num_heads=HEADS)


@pytest.mark.oracle
@pytest.mark.parametrize("tokens", [LENGTH, 6])
def test_outputs_and_gradients_equal_those_of_the_package_linformer(build, agrees, tokens):
    from linformer.linformer import LinformerSelfAttention

    their = LinformerSelfAttention(WIDTH, LENGTH, k=4, num_heads=HEADS).double()
    layer = build(
        "linformer", {"rank": 4, "length": LENGTH}, hidden_size=WIDTH, num_heads=HEADS, causal=False, bias=True
    )
    none = torch.zeros(WIDTH, dtype=torch.float64)
    layer.load_state_dict(
        {
            "query.weight": their.to_q.weight,
            "key.weight": their.to_k.weight,
            "value.weight": their.to_v.weight,
            "output.weight": their.to_out.weight,
            "output.bias": their.to_out.bias,
            "inner.key_weight": their.proj_k[None],
            "inner.value_weight": their.proj_v[None],
            "query.bias": none,
            "key.bias": none,
            "value.bias": none,
        }
    )
    rows = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    pairs = [(layer.query.weight, their.to_q.weight), (layer.output.weight, their.to_out.weight)]
    oracle = agrees("linformer", package="linformer LinformerSelfAttention")
    oracle.functions(layer, their, rows, weights=pairs, tolerance=1e-12)
    for attention in (layer, their):
        attention(rows).square().sum().backward()
    oracle.gradients([layer.inner.key_weight.grad[0]], [their.proj_k.grad], 1e-12)


def shared_layers(count, options=None, first=0):
    mechanism = installed().mechanisms.get("linformer")
    options = {"rank": 4, "length": LENGTH, "sharing": "layers"} | (options or {})
    sizes = {"hidden_size": WIDTH, "num_heads": HEADS, "causal": False}
    configs = [configure(mechanism, options, layer=layer, **sizes) for layer in range(first, first + count)]
    torch.manual_seed(0)
    return mechanism, configs, [mechanism.build(config).double() for config in configs]


def test_layers_that_share_have_one_projection_and_each_its_own_queries():
    mechanism, configs, layers = shared_layers(3)
    mechanism.share_weights(list(zip(configs, layers, strict=True)))
    alone = mechanism.build(configs[0]).double()
    alone.load_state_dict(layers[2].state_dict() | {"inner.key_weight": layers[0].inner.key_weight})
    rows = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layers[2](rows), alone(rows), rtol=0, atol=1e-14)
    held = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    assert held == [mechanism.cost(config, Shape(query=7, key=7)).parameters for config in configs]
    assert held[0] - held[1] == 4 * LENGTH == held[0] - held[2]
    (gradient,) = torch.autograd.grad(layers[1](layers[2](rows)).sum(), layers[0].inner.key_weight)
    assert gradient.abs().max() > 0


def test_a_copy_of_layers_that_share_shares_among_itself():
    mechanism, configs, layers = shared_layers(2)
    mechanism.share_weights(list(zip(configs, layers, strict=True)))
    copied = copy.deepcopy(torch.nn.ModuleList(layers))
    rows = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        copied[0].inner.key_weight.zero_()
    assert not torch.equal(copied[1](rows), layers[1](rows))


@pytest.mark.parametrize(("options", "first"), [({}, 1), ({"rank": 5}, 0)])
def test_a_model_whose_first_layer_has_no_projection_to_share_is_refused(options, first):
    mechanism, configs, layers = shared_layers(2, first=first)
    if options:
        _, others, built = shared_layers(2, options)
        configs[1], layers[1] = others[1], built[1]
    with pytest.raises(Incompatible, match="first layer"):
        mechanism.share_weights(list(zip(configs, layers, strict=True)))


def test_a_later_layer_alone_says_what_it_lacks():
    _, _, layers = shared_layers(2)
    with pytest.raises(WrongState, match="share_weights"):
        layers[1](torch.randn(1, 5, WIDTH, dtype=torch.float64))
