"""What keeps scores in a range: norms of queries and keys, and caps."""

import itertools
import math

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.oracle
def test_normed_queries_and_keys_are_those_of_qwen3_in_transformers(build, agrees):
    from attn_core import Rotary
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, attn_implementation="eager"
    )
    peer = Qwen3Attention(config, 0).double().eval()
    layer = build(
        "qk_norm", hidden_size=32, num_heads=4, num_kv_heads=2, rotary=Rotary(base=config.rope_parameters["rope_theta"])
    )
    with torch.no_grad():
        for ours, theirs in (
            (layer.query, peer.q_proj),
            (layer.key, peer.k_proj),
            (layer.value, peer.v_proj),
            (layer.output, peer.o_proj),
        ):
            ours.weight.copy_(theirs.weight)
        for ours, theirs in ((layer.norm.query_gain, peer.q_norm), (layer.norm.key_gain, peer.k_norm)):
            ours.copy_(theirs.weight.normal_())
    rows = doubles(2, 9, 32)
    mask = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    turns = Qwen3RotaryEmbedding(config)(rows, torch.arange(9)[None])
    # transformers norms and turns in float32, whatever the rows are.
    oracle = agrees("qk_norm", package="transformers Qwen3Attention")
    oracle.functions(layer, lambda given: peer(given, turns, mask)[0], rows, tolerance=1e-5)


@pytest.mark.oracle
def test_capped_scores_are_those_of_gemma2_in_transformers(build, agrees):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    layer = build("soft_cap", {"cap": 1.5}, hidden_size=32, num_heads=4, num_kv_heads=2)
    module = torch.nn.Module()
    module.num_key_value_groups, module.head_dim, module.training = 2, 8, False
    mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)[None, None]

    def theirs(rows):
        query, key, value = (part.transpose(1, 2) for part in layer.project(rows, None))
        return layer.output(eager_attention_forward(module, query, key, value, mask, softcap=1.5)[0].flatten(-2))

    # transformers takes the softmax in float32.
    oracle = agrees("soft_cap", package="transformers Gemma2 eager_attention_forward")
    oracle.functions(layer, theirs, doubles(2, 6, 32), tolerance=1e-6)


def test_no_length_of_queries_and_keys_changes_normed_attention(build):
    layer, other = build("qk_norm", hidden_size=16, num_heads=2), build("qk_norm", hidden_size=16, num_heads=2)
    state = layer.state_dict()
    other.load_state_dict(
        {**state, "query.weight": 1e3 * state["query.weight"], "key.weight": 1e4 * state["key.weight"]}
    )
    rows = doubles(1, 6, 16)
    assert torch.allclose(layer(rows), other(rows), rtol=0, atol=1e-4)


def test_queries_and_keys_of_length_one_meet_as_cosines_times_one_number(build, agrees):
    layer = build("qk_l2_norm", {"length": 9}, hidden_size=12, num_heads=2)
    rows, upstream = doubles(6, 12), doubles(6, 12)
    query, key, value = (linear(rows).view(6, 2, 6) for linear in (layer.query, layer.key, layer.value))
    gain, out = layer.norm.query_gain, []
    for i, h in itertools.product(range(6), range(2)):
        angles = [torch.cosine_similarity(query[i, h], key[j, h], dim=0) for j in range(i + 1)]
        out.append(torch.softmax(gain * torch.stack(angles), 0) @ value[: i + 1, h])
    found, expected = layer(rows[None])[0], layer.output(torch.stack(out).view(6, 12))
    oracle = agrees("qk_l2_norm", paper="torch's cosine of every pair times g, in loops")
    oracle.outputs(found, expected, 1e-10)
    weights = list(layer.parameters())
    oracle.gradients(*(torch.autograd.grad(each, weights, upstream) for each in (found, expected)), 1e-10)


@pytest.mark.parametrize("length", [2, 1024])
def test_the_number_starts_at_the_logarithm_of_all_pairs_of_a_sequence(build, length):
    gain = build("qk_l2_norm", {"length": length}, hidden_size=12, num_heads=2).norm.query_gain
    assert gain.tolist() == pytest.approx([math.log2(length * (length - 1))], rel=1e-6)


def test_no_query_and_no_key_gives_scores_of_zero_and_no_nan(build):
    layer = build("qk_l2_norm", hidden_size=12, num_heads=2)
    rows = torch.zeros(1, 4, 12, dtype=torch.float64, requires_grad=True)
    out = layer(rows)
    assert torch.autograd.grad(out.sum(), rows)[0].isfinite().all()
    assert torch.allclose(layer.weights(rows)[0, 0, 3], torch.full((4,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize(("option", "value"), [("length", 1), ("length", 2.5), ("eps", 0.0)])
def test_lengths_without_a_pair_and_no_epsilon_are_refused(build, option, value):
    with pytest.raises(InvalidValue, match=rf"mechanism 'qk_l2_norm'.*{option}"):
        build("qk_l2_norm", {option: value}, hidden_size=12, num_heads=2)


def test_a_cap_far_above_the_scores_changes_nothing_and_a_low_one_flattens(build, agrees):
    high, low, mha = (
        build(*how, hidden_size=16, num_heads=2)
        for how in (("soft_cap", {"cap": 1e9}), ("soft_cap", {"cap": 1e-9}), ("mha",))
    )
    high.load_state_dict(mha.state_dict())
    low.load_state_dict(mha.state_dict())
    rows = doubles(1, 6, 16)
    agrees("soft_cap", identity="a cap far above the scores is mha").outputs(high(rows), mha(rows), 1e-7)
    uniform = torch.ones(6, 6, dtype=torch.float64).tril() / torch.arange(1, 7)[:, None]
    assert torch.allclose(low.weights(rows)[0, 0], uniform, rtol=0, atol=1e-8)


def test_attention_without_positions_refuses_rotary_ones(build):
    from attn_core import Rotary

    with pytest.raises(Incompatible, match="nope"):
        build("nope", hidden_size=16, num_heads=2, rotary=Rotary())
