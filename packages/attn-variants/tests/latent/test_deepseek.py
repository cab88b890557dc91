"""Against transformers' DeepSeek attention with the same weights, in float64."""

import pytest
import torch

pytestmark = pytest.mark.oracle

WIDTH, HEADS, LATENT, ROTATED, NOPE, VALUE, TOKENS = 32, 4, 12, 6, 5, 7, 9
OPTIONS = {"latent": LATENT, "rotary_size": ROTATED, "nope_size": NOPE, "value_size": VALUE}
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "num_hidden_layers": 1,
    "attn_implementation": "sdpa",
}


def theirs(version, query_latent, bias):
    """Their layer and what turns its keys, all in float64: their own norms and angles are float32."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    angles = torch.arange(TOKENS, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(0, ROTATED, 2, dtype=torch.float64) / ROTATED
    )
    sizes = SIZES | {"q_lora_rank": query_latent, "attention_bias": bias}
    if version == 2:
        layer = v2.DeepseekV2Attention(v2.DeepseekV2Config(**sizes), 0)
        cos_sin = torch.polar(torch.ones_like(angles), angles)[None]
    else:
        layer = v3.DeepseekV3Attention(v3.DeepseekV3Config(**sizes), 0)
        both = torch.cat([angles, angles], -1)[None]
        cos_sin = both.cos(), both.sin()
    for name in ("kv_a_layernorm", "q_a_layernorm"):
        norm = getattr(layer, name)
        if norm is not None:
            wide = torch.nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
            torch.nn.init.uniform_(wide.weight, 0.5, 1.5)
            setattr(layer, name, wide)
    return layer.double().eval(), cos_sin


def copy_weights(layer, their):
    up = their.kv_b_proj.weight.view(HEADS, NOPE + VALUE, LATENT)
    pairs = {
        "latent": their.kv_a_proj_with_mqa.weight[:LATENT],
        "rotary_key": their.kv_a_proj_with_mqa.weight[LATENT:],
        "latent_norm": their.kv_a_layernorm.weight,
        "key_up": up[:, :NOPE].reshape(-1, LATENT),
        "value_up": up[:, NOPE:].reshape(-1, LATENT),
        "output": their.o_proj.weight,
    }
    if their.q_lora_rank is None:
        pairs["query"] = their.q_proj.weight
    else:
        pairs["query_down"] = their.q_a_proj.weight
        pairs["query_norm"] = their.q_a_layernorm.weight
        pairs["query_up"] = their.q_b_proj.weight
    weights = {f"{name}.weight": weight for name, weight in pairs.items()}
    if their.o_proj.bias is not None:
        weights["latent.bias"] = their.kv_a_proj_with_mqa.bias[:LATENT]
        weights["rotary_key.bias"] = their.kv_a_proj_with_mqa.bias[LATENT:]
        weights["output.bias"] = their.o_proj.bias
        if their.q_lora_rank is not None:
            weights["query_down.bias"] = their.q_a_proj.bias
    layer.load_state_dict(weights)


@pytest.mark.parametrize(("version", "query_latent", "bias"), [(2, 10, False), (2, None, True), (3, 10, True)])
def test_outputs_and_gradients_equal_those_of_transformers(build, agrees, version, query_latent, bias):
    their, cos_sin = theirs(version, query_latent, bias)
    layer = build("mla", OPTIONS | {"query_latent": query_latent}, hidden_size=WIDTH, num_heads=HEADS, bias=bias)
    if bias:
        for linear in (their.kv_a_proj_with_mqa, their.o_proj):
            torch.nn.init.normal_(linear.bias)
    copy_weights(layer, their)
    # Version 2 turns in float32 whatever it is given.
    tolerance = 1e-5 if version == 2 else 1e-10
    agrees("mla", package=f"transformers DeepseekV{version}Attention").functions(
        layer,
        lambda rows: their(rows, position_embeddings=cos_sin, attention_mask=None, past_key_values=None)[0],
        torch.randn(2, TOKENS, WIDTH, dtype=torch.float64),
        tolerance=tolerance,
    )


def test_a_whole_model_of_transformers_remembers_the_same_elements():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **SIZES | {"num_hidden_layers": 2},
        q_lora_rank=10,
        vocab_size=11,
        intermediate_size=16,
        first_k_dense_replace=2,
        max_position_embeddings=32,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        cache = model(torch.randint(11, (1, TOKENS)), use_cache=True).past_key_values
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 1, TOKENS, LATENT)] * 2
    assert [tuple(layer.values.shape) for layer in cache.layers] == [(1, 1, TOKENS, ROTATED)] * 2
