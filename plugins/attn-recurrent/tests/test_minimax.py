from attn_testing import ModelLaws

LIGHTNING = {"mechanism": "attn-variants/lightning", "options": {"slope_factor": 0.5, "rotary": None}}
SIZES = {"vocab_size": 31, "max_seq_len": 32, "hidden_size": 16, "num_layers": 3, "num_heads": 4}
BLOCKS = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary"}
FACTORS = {"full_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.1}


class TestMiniMax(ModelLaws):
    family = "minimax"
    configs = {"hybrid": SIZES | BLOCKS | FACTORS | {"pattern": [LIGHTNING, {"mechanism": "attn-variants/mha"}]}}
