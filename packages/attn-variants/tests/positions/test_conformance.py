from attn_core import Rotary
from attn_testing import MechanismLaws

FEW = (
    {"hidden_size": 16, "num_heads": 4},
    {"hidden_size": 12, "num_heads": 3, "bias": True},
    {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2},
    {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "rotary": Rotary(fraction=0.5, interleaved=True)},
)
"""For what the layer of every spec computes, changed at one place."""


class TestT5Bias(MechanismLaws):
    mechanism = "t5_bias"
    options = {"buckets": 8, "max_distance": 12}


class TestRelativeBias(MechanismLaws):
    mechanism = "relative_bias"
    options = {"clip": 4}


class TestShaw(MechanismLaws):
    mechanism = "shaw"
    options = {"clip": 3}


class TestShawWithSharedVectors(MechanismLaws):
    mechanism = "shaw"
    options = {"clip": 2, "share": True}


class TestDependency(MechanismLaws):
    mechanism = "dependency"
    options = {"parse": (2, 2, 3, -1, 6, 6, 3, 3), "clip": 3}


class TestDependencyDepth(MechanismLaws):
    mechanism = "dependency_depth"
    options = {"parse": (2, 2, 3, -1, 6, 6, 3, 3)}
    settings = FEW


class TestAddedPositions(MechanismLaws):
    mechanism = "positions_added"
    settings = FEW


class TestConcatenatedPositions(MechanismLaws):
    mechanism = "positions_concatenated"
    settings = FEW


class TestPath(MechanismLaws):
    mechanism = "path"
    options = {"rank": 6, "taps": 2, "block": 4}
    settings = FEW


class TestPathThatForgets(MechanismLaws):
    mechanism = "path"
    options = {"rank": 6, "taps": 2, "block": 4, "forget_gate": True}
    settings = FEW


class TestSoftCap(MechanismLaws):
    mechanism = "soft_cap"
    options = {"cap": 2.0}


class TestQkNorm(MechanismLaws):
    mechanism = "qk_norm"


class TestQkL2Norm(MechanismLaws):
    mechanism = "qk_l2_norm"
    options = {"length": 20}
    settings = FEW


class TestGemma(MechanismLaws):
    mechanism = "gemma"
    options = {"temperature_floor": 3}


class TestGemmaWithEverything(MechanismLaws):
    mechanism = "gemma"
    options = {"cap": 2.0, "window": 5, "scale": 0.4, "temperature_floor": 3}


class TestGemmaAsLlama4(MechanismLaws):
    mechanism = "gemma"
    options = {"chunk": 4, "temperature": 0.5, "temperature_floor": 3}


class TestNoPositions(MechanismLaws):
    mechanism = "nope"


class TestYarn(MechanismLaws):
    mechanism = "rope"
    options = {"scaling": {"kind": "yarn", "factor": 4, "original_max_position_embeddings": 16}}


class TestDynamicNtk(MechanismLaws):
    mechanism = "rope"
    options = {"scaling": {"kind": "dynamic", "factor": 2, "original_max_position_embeddings": 8, "length": 64}}


class TestDisentangled(MechanismLaws):
    mechanism = "disentangled"
    options = {"buckets": 4, "max_distance": 8, "norm_eps": 1e-5}


class TestDisentangledWithItsOwnProjections(MechanismLaws):
    mechanism = "disentangled"
    options = {"buckets": None, "max_distance": 4, "separate": True, "query_positions": False}
    settings = FEW[:3]
