"""What keeps scores in a range: norms of queries and keys, and caps."""

import pytest
import torch
from attn_core.errors import Incompatible


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
        "qk_norm", width=32, heads=4, key_value_heads=2, rotary=Rotary(base=config.rope_parameters["rope_theta"])
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

    layer = build("soft_cap", {"cap": 1.5}, width=32, heads=4, key_value_heads=2)
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
    layer, other = build("qk_norm", width=16, heads=2), build("qk_norm", width=16, heads=2)
    state = layer.state_dict()
    other.load_state_dict(
        {**state, "query.weight": 1e3 * state["query.weight"], "key.weight": 1e4 * state["key.weight"]}
    )
    rows = doubles(1, 6, 16)
    assert torch.allclose(layer(rows), other(rows), rtol=0, atol=1e-4)


def test_a_cap_far_above_the_scores_changes_nothing_and_a_low_one_flattens(build, agrees):
    high, low, mha = (
        build(*how, width=16, heads=2) for how in (("soft_cap", {"cap": 1e9}), ("soft_cap", {"cap": 1e-9}), ("mha",))
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
        build("nope", width=16, heads=2, rotary=Rotary())
