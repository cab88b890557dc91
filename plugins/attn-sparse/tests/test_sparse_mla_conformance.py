from attn_testing import MechanismLaws


class TestSparseMla(MechanismLaws):
    mechanism = "sparse_mla"
    options = {"index_heads": 3, "index_size": 6, "top": 3, "latent": 6, "query_latent": 7, "rotary_size": 4}


class TestPooledSparseMla(MechanismLaws):
    mechanism = "sparse_mla"
    options = TestSparseMla.options | {"index_heads": 16, "top": 4, "pool": 2, "rotary_size": 0}
