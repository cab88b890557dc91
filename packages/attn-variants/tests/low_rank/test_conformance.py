from attn_testing import MechanismLaws

SETTINGS = (
    {"width": 16, "heads": 4},
    {"width": 8, "heads": 1},
    {"width": 12, "heads": 2, "head_size": 8, "bias": True},
)


class TestLinformer(MechanismLaws):
    mechanism = "linformer"
    options = {"rank": 5}
    settings = SETTINGS


class TestLinformerOfEachHead(MechanismLaws):
    mechanism = "linformer"
    options = {"rank": 3, "sharing": "none", "length": 40}
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
