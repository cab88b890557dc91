from attn_testing import MechanismLaws


class TestGated(MechanismLaws):
    mechanism = "gated"


class TestGatedPerHead(MechanismLaws):
    mechanism = "gated"
    options = {"per": "head"}
