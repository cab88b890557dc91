from attn_core import (
    AttentionSpec,
    Causal,
    DeclaredMechanism,
    Field,
    Mask,
    MechanismConfig,
    Paged,
    Paper,
    Rotary,
    Slot,
    Window,
)
from attn_core.masks import GlobalKeys, Prefix
from attn_testing import MechanismLaws
from attn_variants.mechanisms.common import DECODER

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


class Anchored(DeclaredMechanism):
    """A window, the first tokens and some further ones, as a stranger would write it."""

    name = "anchored"
    summary = "a window, the first tokens and some further ones"
    paper = Paper(title="None", authors="nobody", year=2024)
    equation = r"o_i = \mathrm{softmax}(q_i K_{A_i}^\top) V_{A_i}"
    capabilities = DECODER
    mask: Mask = Window(left=2) | (Prefix(2) | GlobalKeys((5, 11))) & Causal()

    def spec(self, config):
        return AttentionSpec(heads=config.head_layout, mask=self.mask, rotary=config.rotary)


class TestPinnedTokens(MechanismLaws):
    mechanism = Anchored()


def test_only_the_window_and_the_pinned_tokens_are_remembered():
    states = Anchored().state(MechanismConfig(hidden_size=8, num_heads=2))
    row = {"key": Field((2, 4)), "value": Field((2, 4))}
    assert states["kv"] == Paged(row, window=3)
    assert states["pinned"] == Slot({name: Field((4, 2, 4)) for name in row})


class TestHeavyHitters(MechanismLaws):
    mechanism = "h2o"
    options = {"heavy": 2, "recent": 3}
    settings = (SOME[0], SOME[2])
