from attn_testing import MechanismLaws


class TestForgetting(MechanismLaws):
    mechanism = "forgetting"
