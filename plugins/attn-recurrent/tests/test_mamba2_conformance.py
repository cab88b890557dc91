from attn_testing import MechanismLaws


class TestMamba2(MechanismLaws):
    mechanism = "mamba2"
    options = {"state_size": 6}


class TestMamba2WithOneTapAndNoExpansion(MechanismLaws):
    mechanism = "mamba2"
    options = {"state_size": 5, "expand": 1, "taps": 1}
