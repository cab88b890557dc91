from attn_testing import MechanismLaws

SETTINGS = ({"hidden_size": 16, "num_heads": 4}, {"hidden_size": 12, "num_heads": 2, "head_dim": 8, "bias": True})


class TestHashed(MechanismLaws):
    mechanism = "lsh"
    options = {"buckets": 4, "chunk": 3, "rounds": 2}
    settings = SETTINGS[1:]


class TestHashedWithinChunks(MechanismLaws):
    mechanism = "lsh"
    options = {"buckets": 2, "chunk": 4, "rounds": 2, "within": "chunks", "duplicates": "counted"}
    settings = SETTINGS[:1]


class TestRouting(MechanismLaws):
    mechanism = "routing"
    options = {"clusters": 3, "window": 4}
    settings = SETTINGS


class TestCausalHashed(MechanismLaws):
    mechanism = "lsh_causal"
    options = {"buckets": 4, "window": 3, "rounds": 2}
    settings = SETTINGS[1:]


class TestCausalRouting(MechanismLaws):
    mechanism = "routing_causal"
    options = {"clusters": 3, "window": 4}
    settings = SETTINGS[:1]


class TestClustered(MechanismLaws):
    mechanism = "clustered"
    options = {"clusters": 3, "bits": 7, "iterations": 3, "top": 2}
    settings = SETTINGS


class TestClusteredWithoutBestKeys(MechanismLaws):
    mechanism = "clustered"
    options = {"clusters": 4, "bits": 31, "iterations": 2, "top": 0}
    settings = SETTINGS[:1]


class TestSinkhornCausal(MechanismLaws):
    mechanism = "sinkhorn_causal"
    options = {"block": 3, "iterations": 4}


class TestSinkhorn(MechanismLaws):
    mechanism = "sinkhorn"
    options = {"block": 3, "iterations": 4}
    settings = SETTINGS
