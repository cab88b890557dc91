from attn_testing import ModelLaws

GEMMA = {"mechanism": "attn-variants/gemma", "options": {"norm_values": True, "scale": 1.0, "window": 3}}
FULL = {"mechanism": "attn-variants/gemma", "options": {"norm_values": True, "scale": 1.0, "head_dim": 6}}
SIZES = {"vocab_size": 31, "max_seq_len": 32, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
BLOCKS = {"norm": "rms", "norm_place": "both", "feed_forward": "geglu_tanh", "positions": "rotary"}


class TestGemma4(ModelLaws):
    family = "gemma4"
    configs = {
        "shared keys and values": SIZES
        | BLOCKS
        | {"hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": 31, "use_double_wide_mlp": True}
        | {"pattern": [GEMMA, FULL, GEMMA, FULL], "kv_sharing": [0, 1, 0, 1]},
        "keys are values": SIZES | BLOCKS | {"attention_k_eq_v": True, "pattern": [GEMMA, FULL]},
    }
