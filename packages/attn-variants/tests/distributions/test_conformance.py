from attn_testing import MechanismLaws


class TestEntmax15(MechanismLaws):
    mechanism = "entmax"


class TestEntmaxByBisection(MechanismLaws):
    mechanism = "entmax"
    options = {"alpha": 1.7}


class TestAdaptiveEntmax(MechanismLaws):
    mechanism = "adaptive_entmax"


class TestSigmoid(MechanismLaws):
    mechanism = "sigmoid"


class TestSoftmaxOne(MechanismLaws):
    mechanism = "softmax_one"


class TestSink(MechanismLaws):
    mechanism = "sink"


class TestStickBreaking(MechanismLaws):
    mechanism = "stick_breaking"


class TestHard(MechanismLaws):
    mechanism = "hard"


class TestSampled(MechanismLaws):
    mechanism = "sampled"
