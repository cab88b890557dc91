from attn_testing import MechanismLaws


class TestDifferential(MechanismLaws):
    mechanism = "differential"
    options = {"depth": 3}
