"""What the doors refuse: settings that the decoder does not compute, and decoders that a layout cannot say."""

from __future__ import annotations

import pytest
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_models.decoder.config import DecoderConfig
from attn_models.families.doors import DOORS, door_of

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {"experts": 4, "experts_per_token": 2}
GEMMA = {"norm_place": "both", "feed_forward": "geglu_tanh", "scaled_embedding": True}
GPT = {"norm": "layer", "feed_forward": "gelu", "positions": "learned", "bias": True}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PLAIN = {"llama": LLAMA, "mistral": LLAMA, "mixtral": LLAMA, "gpt2": GPT2}


@pytest.mark.parametrize(("layout", "key"), [(layout, key) for layout, values in PLAIN.items() for key in values])
def test_a_missing_key_is_named(layout, key):
    values = {name: value for name, value in PLAIN[layout].items() if name != key}
    with pytest.raises(InvalidValue, match=f"{key}: is missing"):
        door_of(layout).configure(values)


@pytest.mark.parametrize(
    ("layout", "change", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 8}}, "rope_type: 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "su", "factor": 2}}, "rope_type: 'su'"),
        ("llama", {"num_attention_heads": 5}, "heads"),
        ("llama", {"hidden_size": "32"}, "width"),
        ("mixtral", {"num_key_value_heads": 4, "num_experts_per_tok": 9}, "experts_per_token: 9"),
        ("mixtral", {"num_key_value_heads": 4, "num_local_experts": 0}, "experts: 0"),
        ("mixtral", {"num_key_value_heads": 4, "num_local_experts": None}, "experts"),
        ("mixtral", {"num_key_value_heads": 4, "num_local_experts": "8"}, "experts: '8'"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"attention_bias": True}, "attention_bias"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_and_not_ignored(layout, change, named):
    with pytest.raises(InvalidValue, match=named):
        door_of(layout).configure(PLAIN[layout] | change)


def test_an_unknown_model_type_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="'lama'; did you mean 'llama'"):
        door_of("lama")
    with pytest.raises(UnknownName, match="None"):
        door_of(None)


@pytest.mark.parametrize("layout", PLAIN)
def test_a_config_survives_its_own_layout(layout):
    door = DOORS[layout]
    config = door.configure(PLAIN[layout] | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7})
    assert door.configure(door.describe(config)) == config


@pytest.mark.parametrize(
    ("layout", "change", "named"),
    [
        ("llama", {"norm_place": "post"}, "norm_place"),
        ("llama", {"positions": "learned"}, "positions"),
        ("llama", {"mechanism": "sliding_window", "options": {"window": 4}}, "sliding_window"),
        ("llama", {"mechanism": "alibi"}, "alibi"),
        ("llama", {"pattern": ["mha", "gqa"]}, "differ between layers"),
        ("mistral", {"mechanism": "mha", "bias": True}, "biases"),
        ("gpt2", {}, "norm"),
        ("gpt2", EXPERTS | GPT, "experts 4"),
        ("llama", EXPERTS, "experts 4"),
        ("mistral", EXPERTS, "experts 4"),
        ("qwen3", EXPERTS | {"mechanism": "gemma"}, "experts 4"),
        ("gemma2", EXPERTS | GEMMA, "experts 4"),
        ("mixtral", {}, "without experts"),
        ("mixtral", EXPERTS | {"routing": "switch"}, "routing 'switch'"),
        ("mixtral", EXPERTS | {"bias": True}, "biases"),
    ],
)
def test_a_decoder_that_a_layout_cannot_say_is_refused(layout, change, named):
    shape = {"vocabulary": 61, "context": 64, "width": 32, "layers": 2, "heads": 4, "norm": "rms"}
    config = DecoderConfig.from_plain(shape | {"feed_forward": "swiglu", "positions": "rotary"} | change)
    with pytest.raises(Incompatible, match=named):
        DOORS[layout].describe(config)
