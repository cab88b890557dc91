"""The list of all mechanisms of this package."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.alignment import Alignment, HardVisual, SoftVisual
from attn_variants.mechanisms.attention_sinks import AttentionSinks
from attn_variants.mechanisms.causal_clusters import (
    CausalHashedAttention,
    CausalRoutingAttention,
    CausalSinkhornAttention,
)
from attn_variants.mechanisms.clusters import ClusteredAttention, HashedAttention, RoutingAttention, SinkhornAttention
from attn_variants.mechanisms.compressive import CompressiveMemory
from attn_variants.mechanisms.coverage import CoverageAttention
from attn_variants.mechanisms.delta_rules import DeltaNet, KimiDeltaAttention
from attn_variants.mechanisms.dependency import DependencyAttention, DependencyDepthAttention
from attn_variants.mechanisms.disentangled import DisentangledAttention
from attn_variants.mechanisms.distributions import (
    AdaptiveEntmaxAttention,
    EntmaxAttention,
    HardAttention,
    SampledAttention,
    SigmoidAttention,
    SinkAttention,
    SoftmaxOneAttention,
    SparsemaxAttention,
    StickBreakingAttention,
)
from attn_variants.mechanisms.gat import GraphAttention
from attn_variants.mechanisms.h2o import HeavyHitters
from attn_variants.mechanisms.key_value import KeyValue, KeyValuePredict
from attn_variants.mechanisms.kv_policies import Quest, SnapKV, Tova
from attn_variants.mechanisms.latent import FactorisedAttention, MultiHeadLatentAttention
from attn_variants.mechanisms.linear import EfficientAttention, LinearAttention, Performer
from attn_variants.mechanisms.longformer import LongformerAttention
from attn_variants.mechanisms.low_rank import Linformer, LowRankAttention, NystromAttention
from attn_variants.mechanisms.lstmn import LongShortTermMemoryNetwork
from attn_variants.mechanisms.most_used import MostUsedMemory
from attn_variants.mechanisms.multi_head import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
)
from attn_variants.mechanisms.norms import GemmaAttention, QkL2NormAttention, QkNormAttention, SoftCapAttention
from attn_variants.mechanisms.ntm import NeuralTuringMachine
from attn_variants.mechanisms.path import PathAttention
from attn_variants.mechanisms.positions import (
    AddedPositions,
    AttentionWithLinearBiases,
    ConcatenatedPositions,
    NoPositions,
    RelativeBiasAttention,
    RotaryAttention,
    ShawAttention,
    T5Attention,
)
from attn_variants.mechanisms.recurrences import GatedLinearAttention, LightningAttention, Retention
from attn_variants.mechanisms.scores import (
    AdditiveAttention,
    ConcatAttention,
    CosineAttention,
    DotAttention,
    GeneralAttention,
    GlobalLuongAttention,
    LocationAttention,
    MonotonicLocalAttention,
    PredictiveLocalAttention,
)
from attn_variants.mechanisms.sparse_patterns import (
    BigBirdAttention,
    BlockLocalAttention,
    ChunkedAttention,
    ChunkRingAttention,
    DilatedWindow,
    FixedAttention,
    NeighborhoodAttention,
    SlidingWindow,
    StridedAttention,
)

OFFERED: tuple[type[Mechanism], ...] = (
    MultiHeadAttention,
    GroupedQueryAttention,
    MultiQueryAttention,
    SlidingWindow,
    AttentionWithLinearBiases,
    RotaryAttention,
    AdditiveAttention,
    GemmaAttention,
    GeneralAttention,
    SparsemaxAttention,
    LinearAttention,
    ConcatAttention,
    CosineAttention,
    DotAttention,
    MonotonicLocalAttention,
    PredictiveLocalAttention,
    LocationAttention,
    GlobalLuongAttention,
    AdaptiveEntmaxAttention,
    EntmaxAttention,
    HardAttention,
    SampledAttention,
    SigmoidAttention,
    SinkAttention,
    SoftmaxOneAttention,
    StickBreakingAttention,
    AddedPositions,
    ConcatenatedPositions,
    DependencyAttention,
    DependencyDepthAttention,
    DisentangledAttention,
    NoPositions,
    PathAttention,
    QkL2NormAttention,
    QkNormAttention,
    RelativeBiasAttention,
    ShawAttention,
    SoftCapAttention,
    T5Attention,
    DilatedWindow,
    LongformerAttention,
    AttentionSinks,
    HeavyHitters,
    SnapKV,
    Tova,
    Quest,
    StridedAttention,
    FixedAttention,
    BigBirdAttention,
    NeighborhoodAttention,
    ChunkedAttention,
    BlockLocalAttention,
    ChunkRingAttention,
    MultiHeadLatentAttention,
    FactorisedAttention,
    Linformer,
    NystromAttention,
    LowRankAttention,
    HashedAttention,
    RoutingAttention,
    ClusteredAttention,
    SinkhornAttention,
    CausalSinkhornAttention,
    CausalHashedAttention,
    CausalRoutingAttention,
    GraphAttention,
    Retention,
    GatedLinearAttention,
    DeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Performer,
    EfficientAttention,
    Alignment,
    SoftVisual,
    HardVisual,
    CoverageAttention,
    CompressiveMemory,
    MostUsedMemory,
    LongShortTermMemoryNetwork,
    NeuralTuringMachine,
    KeyValue,
    KeyValuePredict,
)
"""The classes of all mechanisms, in the order in which they are listed."""


def offered() -> list[Mechanism]:
    """An instance of every mechanism."""
    return [mechanism() for mechanism in OFFERED]
