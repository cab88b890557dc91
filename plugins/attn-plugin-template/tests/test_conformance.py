from attn_testing import MechanismLaws


class TestKerple(MechanismLaws):
    mechanism = "kerple_log"
    options = {"r1": 0.5, "r2": 2.0}
