from attn_testing import MechanismLaws


class TestRwkv7(MechanismLaws):
    mechanism = "rwkv7"
    options = {"decay_rank": 5, "rate_rank": 3, "gate_rank": 4}


class TestRwkv7Channel(MechanismLaws):
    mechanism = "rwkv7_channel"
