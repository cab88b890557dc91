from attn_testing import MechanismLaws


class TestMoba(MechanismLaws):
    mechanism = "moba"
    options = {"block": 3, "top": 2}
