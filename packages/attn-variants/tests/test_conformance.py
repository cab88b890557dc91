from attn_core import Rotary
from attn_testing import MechanismLaws


class TestMultiHead(MechanismLaws):
    mechanism = "mha"


class TestGroupedQuery(MechanismLaws):
    mechanism = "gqa"


class TestSmallerGroupedValues(MechanismLaws):
    mechanism = "gqa"
    options = {"value_size": 3}
    settings = ({"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "rotary": Rotary()},)


class TestUnequalGroups(MechanismLaws):
    mechanism = "gqa"
    options = {"groups": [0, 1, 0, 0]}
    settings = (
        {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "rotary": Rotary()},
        {"hidden_size": 16, "num_heads": 4},
    )


class TestMultiQuery(MechanismLaws):
    mechanism = "mqa"


class TestSlidingWindow(MechanismLaws):
    mechanism = "sliding_window"
    options = {"window": 3}


class TestAlibi(MechanismLaws):
    mechanism = "alibi"


class TestRope(MechanismLaws):
    mechanism = "rope"


class TestInterleavedPartialRope(MechanismLaws):
    mechanism = "rope"
    options = {"interleaved": True, "fraction": 0.5}


class TestAdditive(MechanismLaws):
    mechanism = "additive"
    options = {"intermediate_size": 5}


class TestGeneral(MechanismLaws):
    mechanism = "general"


class TestSparsemax(MechanismLaws):
    mechanism = "sparsemax"


class TestLinear(MechanismLaws):
    mechanism = "linear"
    options = {"chunk": 3}
