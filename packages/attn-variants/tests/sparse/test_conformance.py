from attn_core import Rotary
from attn_testing import MechanismLaws

FEW = ({"hidden_size": 16, "num_heads": 4}, {"hidden_size": 12, "num_heads": 3, "bias": True})
"""For what differs from another class by an option only."""

SOME = (
    {"hidden_size": 16, "num_heads": 4},
    {"hidden_size": 12, "num_heads": 3, "bias": True},
    {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "rotary": Rotary(fraction=0.5, interleaved=True)},
)
"""For what is a spec and a mask that is the same for all heads: its layer is that of every spec."""


class TestDilatedWindow(MechanismLaws):
    mechanism = "dilated_window"
    options = {"window": 3, "dilations": (1, 2, 3)}


class TestStrided(MechanismLaws):
    mechanism = "strided"
    options = {"stride": 3}
    settings = SOME


class TestStridedByHeads(MechanismLaws):
    mechanism = "strided"
    options = {"stride": 2, "pattern": "heads"}
    settings = FEW


class TestFixed(MechanismLaws):
    mechanism = "fixed"
    options = {"block": 4, "summaries": 1}
    settings = SOME


class TestBigBird(MechanismLaws):
    mechanism = "bigbird"
    options = {"block": 1, "random": 1}
    settings = SOME


class TestNeighborhood(MechanismLaws):
    mechanism = "neighborhood"
    options = {"size": 3}
    settings = SOME


class TestDilatedNeighborhood(MechanismLaws):
    mechanism = "neighborhood"
    options = {"size": 3, "dilation": 2}
    settings = FEW


class TestNeighborhoodOfAPlane(MechanismLaws):
    mechanism = "neighborhood"
    options = {"size": 2, "grid": (5, 6)}
    settings = FEW


class TestChunked(MechanismLaws):
    mechanism = "chunked"
    options = {"chunk": 3}
    settings = SOME


class TestBlockLocal(MechanismLaws):
    mechanism = "block_local"
    options = {"block": 2}
    settings = SOME


class TestChunkRing(MechanismLaws):
    mechanism = "chunk_ring"
    options = {"chunk": 2}
    settings = FEW


class TestLongformer(MechanismLaws):
    mechanism = "longformer"
    options = {"window": 2, "global_positions": (0, 6)}
    settings = (*FEW, {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "bias": True})


class TestAttentionSinks(MechanismLaws):
    mechanism = "attention_sinks"
    options = {"sinks": 2, "window": 3}


class TestHeavyHitters(MechanismLaws):
    mechanism = "h2o"
    options = {"heavy": 2, "recent": 3}
    settings = (SOME[0], SOME[2])
