from attn_testing import MechanismLaws


class TestMamba2(MechanismLaws):
    mechanism = "mamba2"
    options = {"state_size": 6}


class TestMamba2WithOneTapAndNoExpansion(MechanismLaws):
    mechanism = "mamba2"
    options = {"state_size": 5, "expand": 1, "taps": 1}


class TestLogLinearMamba2(MechanismLaws):
    mechanism = "log_linear_mamba2"
    options = {"state_size": 6, "groups": 1, "levels": 5, "chunk": 8}
