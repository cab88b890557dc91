from attn_testing import MechanismLaws


class TestGatedDeltaNet(MechanismLaws):
    mechanism = "gated_deltanet"


class TestGatedDeltaNetWithWideValuesAndOneTap(MechanismLaws):
    mechanism = "gated_deltanet"
    options = {"value_size": 6, "taps": 1}
