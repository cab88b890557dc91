from attn_core import Rotary
from attn_testing import MechanismLaws


class TestMultiHeadLatent(MechanismLaws):
    mechanism = "mla"
    options = {"latent": 6, "rotary_size": 4}
    settings = (
        {"hidden_size": 16, "num_heads": 4},
        {"hidden_size": 12, "num_heads": 2, "head_dim": 8, "bias": True},
        {"hidden_size": 16, "num_heads": 2, "rotary": Rotary(fraction=0.5)},
    )


class TestMultiHeadLatentWithQueryLatent(MechanismLaws):
    mechanism = "mla"
    options = {"latent": 5, "rotary_size": 2, "nope_size": 3, "value_size": 6, "query_latent": 7, "score_factor": 1.3}
    settings = ({"hidden_size": 12, "num_heads": 3, "bias": True},)


class TestFactorised(MechanismLaws):
    mechanism = "transmla"
    options = {"latent": 6}
    settings = (
        {"hidden_size": 16, "num_heads": 4},
        {"hidden_size": 12, "num_heads": 2, "head_dim": 8, "bias": True},
        {"hidden_size": 16, "num_heads": 2, "rotary": Rotary(interleaved=True)},
    )
