from attn_testing import MechanismLaws

SETTINGS = (
    {"hidden_size": 16, "num_heads": 4},
    {"hidden_size": 8, "num_heads": 1},
    {"hidden_size": 12, "num_heads": 2, "head_dim": 8, "bias": True},
)


class TestLinformer(MechanismLaws):
    mechanism = "linformer"
    options = {"rank": 5}
    settings = SETTINGS


class TestLinformerOfEachHead(MechanismLaws):
    mechanism = "linformer"
    options = {"rank": 3, "sharing": "none", "length": 130}
    settings = SETTINGS[:1]


class TestLinformerOfKeysAndValues(MechanismLaws):
    mechanism = "linformer"
    options = {"rank": 3, "sharing": "keys_values"}
    settings = SETTINGS[:1]


class TestNystrom(MechanismLaws):
    mechanism = "nystrom"
    options = {"landmarks": 3, "kernel": 5}
    settings = SETTINGS


class TestNystromWithoutConvolution(MechanismLaws):
    mechanism = "nystrom"
    options = {"landmarks": 4, "kernel": 0}
    settings = SETTINGS[:1]


class TestLowRank(MechanismLaws):
    mechanism = "low_rank"
    options = {"rank": 2}
    settings = SETTINGS
