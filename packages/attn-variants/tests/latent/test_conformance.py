from attn_testing import MechanismLaws


class TestMultiHeadLatent(MechanismLaws):
    mechanism = "mla"
    options = {"latent": 6, "rotary_size": 4}


class TestMultiHeadLatentWithQueryLatent(MechanismLaws):
    mechanism = "mla"
    options = {"latent": 5, "rotary_size": 2, "nope_size": 3, "value_size": 6, "query_latent": 7}
