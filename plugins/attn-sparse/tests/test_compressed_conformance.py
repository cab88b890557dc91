from attn_testing import MechanismLaws

SIZES = {"window": 3, "query_latent": 6, "output_groups": 2, "output_latent": 5}


class TestCompressed(MechanismLaws):
    mechanism = "compressed"
    options = SIZES | {"every": 2, "top": 2, "index_heads": 3, "index_size": 6}


class TestHeavilyCompressed(MechanismLaws):
    mechanism = "compressed"
    options = SIZES | {"every": 3, "overlap": False, "top": None}
