from attn_testing import MechanismLaws


class TestNsa(MechanismLaws):
    mechanism = "nsa"
    options = {"compress": 4, "stride": 2, "select": 4, "top": 3, "window": 3}


class TestNsaOfMeans(MechanismLaws):
    mechanism = "nsa"
    options = {
        "compress": 4,
        "stride": 4,
        "select": 4,
        "top": 3,
        "window": 3,
        "compression": "mean",
        "gate_bias": False,
    }
