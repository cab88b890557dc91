from attn_testing import MechanismLaws


class TestNsa(MechanismLaws):
    mechanism = "nsa"
    options = {"compress": 4, "stride": 2, "select": 4, "top": 3, "window": 3}
