from attn_testing import MechanismLaws


class TestDsa(MechanismLaws):
    mechanism = "dsa"
    options = {"index_heads": 3, "index_size": 4, "top": 3}
