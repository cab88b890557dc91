"""What adapters refuse: settings that the decoder does not compute, decoders that a layout cannot express."""

from __future__ import annotations

import pytest
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_models.adapters.registry import ADAPTERS, decoder_adapter
from attn_schema.decoder import DecoderConfig

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
GEMMA = {"norm_place": "both", "feed_forward": "geglu_tanh", "scale_embedding": True}
GPT = {"norm": "layer", "feed_forward": "gelu", "positions": "learned", "bias": True}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DEEPSEEK = LLAMA | {
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
LATENT = {
    "mechanism": "mla",
    "options": {"latent": 12, "rotary_size": 4, "nope_size": 8, "value_size": 6},
    "rope_interleave": True,
}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
PLAIN = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "gpt2": GPT2,
}


@pytest.mark.parametrize(("layout", "key"), [(layout, key) for layout, values in PLAIN.items() for key in values])
def test_a_missing_key_is_named(layout, key):
    values = {name: value for name, value in PLAIN[layout].items() if name != key}
    with pytest.raises(InvalidValue, match=f"{key}: is missing"):
        decoder_adapter(layout).from_hf_config(values)


@pytest.mark.parametrize(
    ("layout", "change", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 8}}, "rope_type: 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "su", "factor": 2}}, "rope_type: 'su'"),
        ("llama", {"num_attention_heads": 5}, "num_heads"),
        ("llama", {"hidden_size": "32"}, "hidden_size"),
        ("mixtral", {"num_key_value_heads": 4, "num_experts_per_tok": 9}, "num_experts_per_tok: 9"),
        ("mixtral", {"num_key_value_heads": 4, "num_local_experts": 0}, "num_experts: 0"),
        ("mixtral", {"num_key_value_heads": 4, "num_local_experts": None}, "num_experts"),
        ("mixtral", {"num_key_value_heads": 4, "num_local_experts": "8"}, "num_experts: '8'"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"attention_bias": True}, "attention_bias"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank: is missing"),
        ("deepseek_v3", {"n_group": 3, "topk_group": 1}, "n_group: 3"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_and_not_ignored(layout, change, named):
    with pytest.raises(InvalidValue, match=named):
        decoder_adapter(layout).from_hf_config(PLAIN[layout] | change)


def test_an_unknown_model_type_is_answered_with_names_like_it_and_what_to_do():
    with pytest.raises(UnknownName, match=r"'mistrall'; names like it: mistral.*model-families\.md"):
        decoder_adapter("mistrall")
    with pytest.raises(UnknownName, match="None"):
        decoder_adapter(None)


@pytest.mark.parametrize("layout", PLAIN)
def test_a_config_survives_its_own_layout(layout):
    adapter = ADAPTERS[layout]
    shared, size = (4, 4) if layout.startswith("deepseek") else (2, 8)
    written = {"num_key_value_heads": shared, "head_dim": size, "sliding_window": 7, "n_shared_experts": 1}
    config = adapter.from_hf_config(PLAIN[layout] | written)
    assert not adapter.differences(adapter.from_hf_config(adapter.to_hf_config(config)), config)


@pytest.mark.parametrize(
    ("layout", "change", "named"),
    [
        ("llama", {"norm_place": "post"}, "norm_place"),
        ("llama", {"positions": "learned"}, "positions"),
        ("llama", {"mechanism": "sliding_window", "options": {"window": 4}}, "sliding_window"),
        ("llama", {"mechanism": "alibi"}, "alibi"),
        ("llama", {"pattern": ["mha", "gqa"]}, "differ between layers"),
        ("mistral", {"mechanism": "mha", "bias": True}, "biases"),
        ("gpt2", {}, "activation_function: 'swiglu'"),
        ("gpt2", GPT | {"norm": "rms"}, "norm"),
        ("gpt2", EXPERTS | GPT, "experts 4"),
        ("llama", EXPERTS, "experts 4"),
        ("mistral", EXPERTS, "experts 4"),
        ("qwen3", EXPERTS | {"mechanism": "gemma"}, "experts 4"),
        ("gemma2", EXPERTS | GEMMA, "experts 4"),
        ("deepseek_v3", {}, "'mha' cannot be expressed"),
        ("deepseek_v2", LATENT | {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v2", LATENT | SPARSE | {"routing": "deepseek_v3"}, "routing 'deepseek_v3'"),
        ("deepseek_v3", LATENT | SPARSE | {"routing": "deepseek_v3", "n_shared_experts": None}, "without shared"),
        ("deepseek_v3", LATENT | {"pattern": ["mha", "mla"]}, "differ in attention"),
        ("deepseek_v3", LATENT | {"options": {"norm_eps": 1e-3}}, "eps 0.001"),
        ("deepseek_v3", LATENT | {"options": {"score_factor": 2.0}}, "score_factor of 2"),
        ("mixtral", {}, "without experts"),
        ("mixtral", EXPERTS | {"routing": "switch"}, "routing 'switch'"),
        ("mixtral", EXPERTS | {"bias": True}, "biases"),
    ],
)
def test_a_decoder_that_a_layout_cannot_say_is_refused(layout, change, named):
    shape = {"vocab_size": 61, "max_seq_len": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "norm": "rms"}
    config = DecoderConfig.from_plain(shape | {"feed_forward": "swiglu", "positions": "rotary"} | change)
    with pytest.raises(Incompatible, match=named):
        ADAPTERS[layout].to_hf_config(config)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "beta_fast": 16.0},
    ],
    ids=["llama3", "yarn"],
)
def test_stretched_positions_are_read_and_written_again(rope):
    given = {"rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16, **rope}
    adapter = decoder_adapter("llama")
    config = adapter.from_hf_config(LLAMA | {"rope_parameters": given})
    assert config.rotary.scaling.original_max_position_embeddings == 16
    written = adapter.to_hf_config(config)["rope_parameters"]
    assert {key: written[key] for key in given} == given
    assert adapter.from_hf_config(LLAMA | {"rope_parameters": written}) == config
