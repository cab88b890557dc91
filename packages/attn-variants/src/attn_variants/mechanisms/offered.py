"""All mechanisms of this package."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.additive import AdditiveAttention
from attn_variants.mechanisms.alibi import AttentionWithLinearBiases
from attn_variants.mechanisms.clusters.clustered import ClusteredAttention
from attn_variants.mechanisms.clusters.lsh import HashedAttention
from attn_variants.mechanisms.clusters.routing import RoutingAttention
from attn_variants.mechanisms.clusters.sinkhorn import SinkhornAttention
from attn_variants.mechanisms.cross import CrossAttention
from attn_variants.mechanisms.distributions.family import distributions
from attn_variants.mechanisms.gat import GraphAttention
from attn_variants.mechanisms.gemma import GemmaAttention
from attn_variants.mechanisms.general import GeneralAttention
from attn_variants.mechanisms.gqa import GroupedQueryAttention
from attn_variants.mechanisms.latent.mla import MultiHeadLatentAttention
from attn_variants.mechanisms.latent.transmla import FactorisedAttention
from attn_variants.mechanisms.low_rank.linformer import Linformer
from attn_variants.mechanisms.low_rank.low_rank import LowRankAttention
from attn_variants.mechanisms.low_rank.nystrom import NystromAttention
from attn_variants.mechanisms.memory.alignment import Alignment, HardVisual, SoftVisual
from attn_variants.mechanisms.memory.compressive import CompressiveMemory
from attn_variants.mechanisms.memory.key_value import KeyValue, KeyValuePredict
from attn_variants.mechanisms.memory.lstmn import LongShortTermMemoryNetwork
from attn_variants.mechanisms.memory.ntm import NeuralTuringMachine
from attn_variants.mechanisms.mha import MultiHeadAttention
from attn_variants.mechanisms.mqa import MultiQueryAttention
from attn_variants.mechanisms.positions.family import positions
from attn_variants.mechanisms.recurrences.deltanet import DeltaNet, KimiDeltaAttention
from attn_variants.mechanisms.recurrences.efficient import EfficientAttention
from attn_variants.mechanisms.recurrences.gla import GatedLinearAttention
from attn_variants.mechanisms.recurrences.lightning import LightningAttention
from attn_variants.mechanisms.recurrences.linear import LinearAttention
from attn_variants.mechanisms.recurrences.performer import Performer
from attn_variants.mechanisms.recurrences.retnet import Retention
from attn_variants.mechanisms.rope import RotaryAttention
from attn_variants.mechanisms.scores.family import scores
from attn_variants.mechanisms.sliding_window import SlidingWindow
from attn_variants.mechanisms.sparse.family import sparse
from attn_variants.mechanisms.sparsemax import SparsemaxAttention


def offered() -> list[Mechanism]:
    """One of each."""
    return [
        MultiHeadAttention(),
        GroupedQueryAttention(),
        MultiQueryAttention(),
        SlidingWindow(),
        CrossAttention(),
        AttentionWithLinearBiases(),
        RotaryAttention(),
        AdditiveAttention(),
        GemmaAttention(),
        GeneralAttention(),
        SparsemaxAttention(),
        LinearAttention(),
        *scores(),
        *distributions(),
        *positions(),
        *sparse(),
        MultiHeadLatentAttention(),
        FactorisedAttention(),
        Linformer(),
        NystromAttention(),
        LowRankAttention(),
        HashedAttention(),
        RoutingAttention(),
        ClusteredAttention(),
        SinkhornAttention(),
        GraphAttention(),
        Retention(),
        GatedLinearAttention(),
        DeltaNet(),
        KimiDeltaAttention(),
        LightningAttention(),
        Performer(),
        EfficientAttention(),
        Alignment(),
        SoftVisual(),
        HardVisual(),
        CompressiveMemory(),
        LongShortTermMemoryNetwork(),
        NeuralTuringMachine(),
        KeyValue(),
        KeyValuePredict(),
    ]
