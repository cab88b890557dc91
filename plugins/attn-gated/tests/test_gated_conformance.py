from attn_testing import MechanismLaws


class TestGated(MechanismLaws):
    mechanism = "gated"


class TestGatedPerHead(MechanismLaws):
    mechanism = "gated"
    options = {"per": "head"}


class TestGatedWithNorms(MechanismLaws):
    mechanism = "gated"
    options = {"norm_eps": 1e-3}


class TestGatedWindows(MechanismLaws):
    mechanism = "gated"
    options = {"window": 3, "activation": "softplus", "sink": True}
