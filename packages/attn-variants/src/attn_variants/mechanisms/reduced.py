"""Mechanisms that meet less than every row with every other: latents, low ranks, hashes, clusters and graphs."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.clusters.clustered import ClusteredAttention
from attn_variants.mechanisms.clusters.lsh import HashedAttention
from attn_variants.mechanisms.clusters.routing import RoutingAttention
from attn_variants.mechanisms.clusters.sinkhorn import SinkhornAttention
from attn_variants.mechanisms.graphs.gat import GraphAttention
from attn_variants.mechanisms.latent.mla import MultiHeadLatentAttention
from attn_variants.mechanisms.latent.transmla import FactorisedAttention
from attn_variants.mechanisms.low_rank.linformer import Linformer
from attn_variants.mechanisms.low_rank.low_rank import LowRankAttention
from attn_variants.mechanisms.low_rank.nystrom import NystromAttention


def reduced() -> list[Mechanism]:
    """One of each."""
    return [
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
    ]
