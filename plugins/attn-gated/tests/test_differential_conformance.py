from attn_testing import MechanismLaws


class TestDifferential(MechanismLaws):
    mechanism = "differential"
    options = {"depth": 3}


class TestHalves(MechanismLaws):
    mechanism = "differential"
    options = {"pairs": "halves", "norm_eps": 1e-3}
