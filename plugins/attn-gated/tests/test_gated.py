import math

import attn_gated.gated
import pytest
import torch
from attn_core import Rotary, configure, installed
from attn_core.errors import InvalidValue
from attn_testing import Agreement

GATED = attn_gated.gated.Gated()


def build(options=None, **shared):
    torch.manual_seed(0)
    return GATED.build(configure(GATED, options, **shared)).double()


GATES = {"sigmoid": lambda x: 1 / (1 + torch.exp(-x)), "softplus": lambda x: torch.log(1 + torch.exp(x))}


@pytest.mark.parametrize(
    ("per", "activation", "window", "sink"),
    [("element", "sigmoid", None, None), ("head", "softplus", 2, None), ("element", "softplus", 3, 0.7)],
)
def test_the_output_equals_a_loop_over_the_equation(record_property, per, activation, window, sink):
    options = {"per": per, "activation": activation, "window": window, "sink": sink is not None}
    layer = build(options, hidden_size=6, num_heads=2)
    if sink is not None:
        torch.nn.init.constant_(layer.distribution.logit, sink)
    rows = torch.randn(5, 6, dtype=torch.float64)
    query, key, value, gate = (
        (rows @ linear.weight.T).view(5, 2, -1) for linear in (layer.query, layer.key, layer.value, layer.inner.gate)
    )
    expected = torch.zeros(5, 2, 3, dtype=torch.float64)
    for token in range(5):
        for head in range(2):
            first = 0 if window is None else max(0, token + 1 - window)
            shares = (key[first : token + 1, head] @ query[token, head] / 3**0.5).exp()
            shares = shares / (shares.sum() + (0 if sink is None else math.exp(sink)))
            read = sum(share * value[first + past, head] for past, share in enumerate(shares))
            expected[token, head] = read * GATES[activation](gate[token, head])
    out = layer(rows[None])[0]
    loops = Agreement(record_property, "gated", paper="the equation in loops")
    loops.outputs(out, expected.flatten(1) @ layer.output.weight.T, 1e-13)


@pytest.mark.parametrize("norm_eps", [None, 1e-3])
def test_it_equals_the_attention_of_qwen3_next_forward_and_gradient(record_property, norm_eps):
    pytest.importorskip("transformers")
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    settings = Qwen3NextConfig(
        hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-3,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    theirs = Qwen3NextAttention(settings, 0).double()
    if norm_eps is None:
        theirs.q_norm = theirs.k_norm = torch.nn.Identity()
    shape = {"hidden_size": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    ours = build({"norm_eps": norm_eps}, **shape, rotary=Rotary(fraction=0.5))
    query, gate = theirs.q_proj.weight.view(4, 16, 12).chunk(2, dim=1)
    with torch.no_grad():
        ours.query.weight.copy_(query.flatten(0, 1))
        ours.inner.gate.weight.copy_(gate.flatten(0, 1))
        for mine, name in ((ours.key, "k_proj"), (ours.value, "v_proj"), (ours.output, "o_proj")):
            mine.weight.copy_(getattr(theirs, name).weight)
        if norm_eps is not None:
            for gain, name in ((ours.norm.query_gain, "q_norm"), (ours.norm.key_gain, "k_norm")):
                gain.copy_(1 + getattr(theirs, name).weight.normal_(std=0.3))
    rows = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = torch.full((7, 7), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    turns = Qwen3NextRotaryEmbedding(settings).double()(rows, torch.arange(7)[None])
    oracle = Agreement(record_property, "gated", package="transformers Qwen3NextAttention")
    # Their softmax and their turns are float32.
    oracle.functions(ours, lambda given: theirs(given, turns, mask)[0], rows, tolerance=1e-5)


def test_gates_that_are_wide_open_leave_the_attention_as_it_is(record_property):
    layer = build({"per": "head"}, hidden_size=8, num_heads=2, bias=True)
    mha = installed().mechanisms.get("mha")
    plain = mha.build(configure(mha, hidden_size=8, num_heads=2, bias=True)).double()
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "inner" not in name})
    with torch.no_grad():
        layer.inner.gate.bias.fill_(100.0)
    rows = torch.randn(2, 5, 8, dtype=torch.float64)
    same = Agreement(record_property, "gated", identity="wide open gates are mha")
    same.functions(layer, plain, rows, tolerance=1e-13)
    assert torch.equal(layer.weights(rows), plain.weights(rows))


def test_closed_gates_let_nothing_through():
    layer = build(hidden_size=8, num_heads=2, bias=True)
    with torch.no_grad():
        layer.inner.gate.bias.fill_(-1000.0)
    rows = torch.randn(2, 5, 8, dtype=torch.float64)
    assert torch.equal(layer(rows), layer.output.bias.expand(2, 5, 8))


def test_a_gate_per_anything_else_is_refused_by_name():
    with pytest.raises(InvalidValue, match=r"per.*'token'.*element.*head"):
        configure(GATED, {"per": "token"}, hidden_size=8)


@pytest.mark.parametrize("eps", [0, "small", True])
def test_norms_of_a_bad_eps_are_refused_by_name(eps):
    with pytest.raises(InvalidValue, match="norm_eps"):
        configure(GATED, {"norm_eps": eps}, hidden_size=8)
