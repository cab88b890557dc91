"""Scores against other implementations, closed forms and one another."""

import math

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Heads, configure, installed
from attn_core.errors import Incompatible, InvalidValue
from attn_core.scores import Concat, Cosine
from attn_variants.compute import plain

WIDTH = 12


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def made_identity(layer):
    """The layer with projections that change nothing, as the attentions of Luong et al. have none."""
    with torch.no_grad():
        for linear in (layer.query, layer.key, layer.value, layer.output):
            linear.weight.copy_(torch.eye(WIDTH))
    return layer


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(1.0, [0.50648, 0.18632, 0.30720]), (5.0, [0.91842, 0.00619, 0.07539])],
)
def test_content_addressing_of_a_memory_of_three_rows(agrees, beta, expected):
    spec = AttentionSpec(heads=Heads(query=1, key_value=1, key_size=3, value_size=3), score=Cosine())
    memory = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]], dtype=torch.float64)[None, :, None]
    sharpness = torch.tensor([beta], dtype=torch.float64).expm1().log()
    operands = AttentionInputs(query=memory[:, :1], key=memory, value=memory, parameters={"score.sharpness": sharpness})
    weights = plain.attention_weights(spec, operands)[0, 0, 0]
    golden = agrees("cosine", paper="golden weights over three rows")
    golden.outputs(weights, torch.tensor(expected, dtype=torch.float64), 5e-6)


def test_cosine_scores_are_those_of_torch_and_zero_vectors_have_none(build, agrees):
    layer = build("cosine", hidden_size=WIDTH, num_heads=1, causal=False)
    rows = doubles(1, 5, WIDTH)
    rows[0, 2] = 0
    rows.requires_grad_()
    query, key, _ = (part[0, :, 0] for part in layer.project(rows, None))
    beta = torch.nn.functional.softplus(layer.score.sharpness)
    cosines = torch.cosine_similarity(query[:, None], key[None], dim=-1, eps=1e-30)
    theirs = agrees("cosine", package="torch cosine_similarity")
    theirs.outputs(layer.weights(rows)[0, 0], torch.softmax(beta * cosines, -1), 1e-7)
    layer(rows).sum().backward()
    assert torch.isfinite(rows.grad).all()


def test_sharp_cosines_start_as_wide_as_scaled_products(build):
    beta = torch.nn.functional.softplus(build("cosine", hidden_size=32, num_heads=2).score.sharpness)
    assert torch.allclose(beta, torch.full((2,), 4.0, dtype=torch.float64), rtol=0, atol=1e-6)


def test_concat_is_additive_with_its_weight_in_halves(build, agrees):
    concat, additive = (
        build("concat", {"intermediate_size": 5}, hidden_size=WIDTH, num_heads=3),
        build("additive", {"intermediate_size": 5}, hidden_size=WIDTH, num_heads=3),
    )
    additive.load_state_dict(concat.state_dict())
    same = agrees("concat", identity="additive with its weight in halves")
    same.functions(concat, additive, doubles(2, 6, WIDTH), tolerance=1e-12)


def test_location_scores_are_a_linear_layer_and_do_not_see_the_keys(build, agrees):
    layer = build("location", {"longest": 9}, hidden_size=WIDTH, num_heads=1, causal=False)
    rows = doubles(1, 6, WIDTH)
    expected = torch.softmax((layer.query(rows) @ layer.score.weight[0].T)[..., :6], -1)
    agrees("location", paper="softmax of a linear layer").outputs(layer.weights(rows)[:, 0], expected, 1e-14)
    assert layer.key is None
    mechanism = installed().mechanisms.get("location")
    state = mechanism.state(configure(mechanism, {"longest": 9}, hidden_size=WIDTH, num_heads=1))
    assert set(state["kv"].fields) == {"value"}


def test_more_keys_than_location_scores_have_rows_are_refused(build):
    layer = build("location", {"longest": 4}, hidden_size=WIDTH, num_heads=1)
    with pytest.raises(InvalidValue, match="at most 4"):
        layer(doubles(1, 5, WIDTH))
    operands = layer.operands(
        doubles(1, 1, 1, WIDTH),
        {"value": doubles(1, 2, 1, WIDTH)},
        positions=(torch.tensor([[4]]), torch.tensor([[3, 4]])),
    )
    with pytest.raises(InvalidValue, match="position 4"):
        plain.attend(layer.spec, operands)


def test_dot_attention_is_multi_head_attention_of_scaled_queries(build, agrees):
    dot, mha = build("dot", hidden_size=WIDTH, num_heads=3), build("mha", hidden_size=WIDTH, num_heads=3)
    mha.load_state_dict({**dot.state_dict(), "query.weight": 2 * dot.query.weight})
    same = agrees("dot", identity="mha of scaled queries")
    same.functions(dot, mha, doubles(2, 6, WIDTH), tolerance=1e-12)


@pytest.mark.oracle
def test_general_scores_are_the_luong_attention_of_joeynmt(build, agrees):
    attention = pytest.importorskip("joeynmt.attention", reason="pip install --no-deps joeynmt==2.3.0")
    peer = attention.LuongAttention(hidden_size=WIDTH, key_size=WIDTH).double()
    layer = made_identity(build("luong", {"score": "general"}, hidden_size=WIDTH, num_heads=1))
    with torch.no_grad():
        layer.score.weight[0].copy_(peer.key_layer.weight)
    key_padding_mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])

    def theirs(state, source):
        peer.compute_proj_keys(source)
        return peer(query=state, mask=key_padding_mask[:, None], values=source)[0]

    oracle = agrees("luong", package="joeynmt LuongAttention")
    oracle.functions(
        lambda state, source: layer(state, source, key_padding_mask=key_padding_mask),
        theirs,
        doubles(2, 1, WIDTH),
        doubles(2, 5, WIDTH),
        tolerance=1e-13,
    )


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["additive", "alignment"])
def test_additive_scores_are_the_bahdanau_attention_of_joeynmt(build, agrees, name):
    attention = pytest.importorskip("joeynmt.attention", reason="pip install --no-deps joeynmt==2.3.0")
    peer = attention.BahdanauAttention(hidden_size=7, key_size=WIDTH, query_size=WIDTH).double()
    shared = {"causal": False} if name == "additive" else {}
    layer = made_identity(build(name, {"intermediate_size": 7}, hidden_size=WIDTH, num_heads=1, **shared))
    with torch.no_grad():
        layer.score.key_weight[0].copy_(peer.key_layer.weight.T)
        layer.score.query_weight[0].copy_(peer.query_layer.weight.T)
        layer.score.vector[0].copy_(peer.energy_layer.weight[0])
        layer.score.bias.zero_()
    key_padding_mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])

    def theirs(state, source):
        peer.compute_proj_keys(source)
        rows = []
        for place in range(state.shape[1]):  # one decoder state at a time
            one = state[:, place : place + 1]
            peer.compute_proj_query(one)
            rows.append(peer(query=one, mask=key_padding_mask[:, None], values=source)[0])
        return torch.cat(rows, 1)

    oracle = agrees(name, package="joeynmt BahdanauAttention")
    if name == "additive":
        rows = doubles(2, 5, WIDTH)
        oracle.functions(
            lambda x: layer(x, key_padding_mask=key_padding_mask), lambda x: theirs(x, x), rows, tolerance=1e-13
        )
    else:
        both = doubles(2, 3, WIDTH), doubles(2, 5, WIDTH)
        oracle.functions(
            lambda *given: layer(*given, key_padding_mask=key_padding_mask), theirs, *both, tolerance=1e-13
        )


@pytest.mark.oracle
@pytest.mark.parametrize("score", ["dot", "general"])
def test_weights_are_those_of_pytorch_nlp(build, agrees, score):
    from torchnlp.nn import Attention

    peer = Attention(WIDTH, attention_type=score).double()
    layer = made_identity(build("luong", {"score": score}, hidden_size=WIDTH, num_heads=1))
    if score == "general":
        with torch.no_grad():
            layer.score.weight[0].copy_(peer.linear_in.weight.T)
    given = doubles(2, 3, WIDTH), doubles(2, 5, WIDTH)
    agrees("luong", package="pytorch-nlp Attention").functions(
        lambda state, source: layer.weights(state, source)[:, 0],
        lambda state, source: peer(state, source)[1],
        *given,
        tolerance=1e-13,
    )


@pytest.mark.parametrize(
    ("mechanism", "options", "named"),
    [
        ("luong", {"score": "cosine"}, "score"),
        ("local_m", {"radius": 0}, "radius"),
        ("local_p", {"radius": 1.5}, "radius"),
        ("concat", {"intermediate_size": 0}, "intermediate_size"),
        ("additive", {"activation": "gelu"}, "activation"),
        ("additive", {"value_size": 0}, "value_size"),
        ("cosine", {"beta": 0.0}, "beta"),
        ("location", {"longest": 0}, "longest"),
    ],
)
def test_bad_options_are_refused_by_name(mechanism, options, named):
    with pytest.raises(InvalidValue, match=named):
        configure(installed().mechanisms.get(mechanism), options, hidden_size=8)


@pytest.mark.parametrize("mechanism", ["luong", "local_m", "local_p"])
def test_a_source_has_no_rotary_positions(build, mechanism):
    from attn_core import Rotary

    with pytest.raises(Incompatible, match=mechanism):
        build(mechanism, hidden_size=WIDTH, num_heads=1, rotary=Rotary())


def test_units_default_to_the_size_of_the_head():
    assert Concat().units(Heads(query=2, key_value=2, key_size=6, value_size=6)) == 6


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("name", ["additive", "concat"])
def test_networks_of_either_activation_and_values_of_another_size_in_loops(build, name, activation):
    values = {"value_size": 5} if name == "additive" else {}
    layer = build(name, {"activation": activation, **values}, hidden_size=WIDTH, num_heads=2, causal=True)
    layer, rows = layer.requires_grad_(requires_grad=False), doubles(1, 4, WIDTH)
    of_query, of_key, of_value = (
        linear(rows)[0].unflatten(-1, (2, -1)) for linear in (layer.query, layer.key, layer.value)
    )
    score, shape = layer.score, math.tanh if activation == "tanh" else lambda x: max(x, 0.0)
    out = []
    for i in range(4):
        heads = []
        for h in range(2):
            hidden = [
                of_query[i, h] @ score.query_weight[h] + of_key[j, h] @ score.key_weight[h] + score.bias[h]
                for j in range(i + 1)
            ]
            energies = [sum(v * shape(float(u)) for v, u in zip(score.vector[h], row, strict=True)) for row in hidden]
            total = sum(math.exp(float(e)) for e in energies)
            heads.append(sum(math.exp(float(e)) / total * of_value[j, h] for j, e in enumerate(energies)))
        out.append(layer.output(torch.cat(heads)))
    torch.testing.assert_close(layer(rows)[0], torch.stack(out), rtol=0, atol=1e-9)


def test_a_cosine_of_its_own_is_not_learned_and_is_the_score(build):
    layer = build("cosine", {"beta": 1.0}, hidden_size=WIDTH, num_heads=1, causal=False)
    rows = doubles(1, 5, WIDTH)
    query, key, _ = (part[0, :, 0] for part in layer.project(rows, None))
    cosines = torch.cosine_similarity(query[:, None], key[None], dim=-1, eps=1e-30)
    torch.testing.assert_close(layer.weights(rows)[0, 0], cosines.softmax(-1), rtol=0, atol=1e-7)
    assert not any("sharpness" in name for name, _ in layer.named_parameters())


@pytest.mark.parametrize(
    ("name", "options", "kv"), [("mha", {}, None), ("gqa", {}, 2), ("sliding_window", {"window": 2}, 2)]
)
@pytest.mark.parametrize("size", [2, 7])
def test_values_of_another_size_than_keys_in_loops(build, name, options, kv, size):
    layer = build(name, options | {"value_size": size}, hidden_size=WIDTH, num_heads=4, num_kv_heads=kv, causal=True)
    rows, shared = doubles(1, 5, WIDTH), kv or 4
    query = layer.query(rows)[0].unflatten(-1, (4, 3))
    key, value = (linear(rows)[0].unflatten(-1, (shared, -1)) for linear in (layer.key, layer.value))
    assert value.shape[-1] == size
    out = []
    for i in range(5):
        first, heads = max(0, i - 1) if "window" in options else 0, []
        for h in range(4):
            own = h * shared // 4
            energies = [float(query[i, h] @ key[j, own]) / math.sqrt(3) for j in range(first, i + 1)]
            total = sum(map(math.exp, energies))
            heads.append(sum(math.exp(e) / total * value[first + j, own] for j, e in enumerate(energies)))
        out.append(layer.output(torch.cat(heads)))
    torch.testing.assert_close(layer(rows)[0], torch.stack(out), rtol=0, atol=1e-9)
