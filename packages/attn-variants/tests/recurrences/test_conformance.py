from attn_testing import MechanismLaws


class TestRetention(MechanismLaws):
    mechanism = "retnet"
    options = {"chunk": 8}


class TestRetentionWithoutPositions(MechanismLaws):
    mechanism = "retnet"
    options = {"chunk": 8, "base": None, "value_size": 5}


class TestRetentionWithXpos(MechanismLaws):
    mechanism = "retnet"
    options = {"chunk": 8, "scale_base": 4.0}


class TestGatedLinear(MechanismLaws):
    mechanism = "gla"
    options = {"chunk": 8, "rank": 3}


class TestDeltaNet(MechanismLaws):
    mechanism = "deltanet"
    options = {"chunk": 8}


class TestDeltaNetWithoutConvolution(MechanismLaws):
    mechanism = "deltanet"
    options = {"chunk": 8, "convolution": 0, "key_size": 4}


class TestKimiDelta(MechanismLaws):
    mechanism = "kda"
    options = {"chunk": 8}


class TestKimiDeltaOfLing(MechanismLaws):
    mechanism = "kda"
    options = {"chunk": 8, "rank": 0, "gate_bias": True, "lower_bound": -5.0}


class TestKimiDeltaWithTwoHeadsForEachKey(MechanismLaws):
    mechanism = "kda"
    options = {"chunk": 8, "key_heads": 2, "value_size": 6}


class TestLightning(MechanismLaws):
    mechanism = "lightning"
    options = {"chunk": 8, "slope_factor": 0.5}


class TestPerformer(MechanismLaws):
    mechanism = "performer"
    options = {"chunk": 8, "features": 7}


class TestPerformerWithReluKernel(MechanismLaws):
    mechanism = "performer"
    options = {"chunk": 8, "kernel": "relu"}


class TestEfficient(MechanismLaws):
    mechanism = "efficient"
