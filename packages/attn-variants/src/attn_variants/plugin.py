"""What this package offers. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core import AttentionSpec, InnerAttention, Kernel, Mechanism, MechanismConfig, hookimpl

from attn_variants.kernels.block_sparse import BlockSparse
from attn_variants.kernels.plain import Plain
from attn_variants.kernels.torch_sdpa import TorchSdpa
from attn_variants.mechanisms.additive import AdditiveAttention
from attn_variants.mechanisms.alibi import AttentionWithLinearBiases
from attn_variants.mechanisms.cross import CrossAttention
from attn_variants.mechanisms.distributions.family import distributions
from attn_variants.mechanisms.gemma import GemmaAttention
from attn_variants.mechanisms.general import GeneralAttention
from attn_variants.mechanisms.gqa import GroupedQueryAttention
from attn_variants.mechanisms.linear import LinearAttention
from attn_variants.mechanisms.memory.family import memories
from attn_variants.mechanisms.mha import MultiHeadAttention
from attn_variants.mechanisms.mqa import MultiQueryAttention
from attn_variants.mechanisms.positions.family import positions
from attn_variants.mechanisms.recurrences.family import recurrences
from attn_variants.mechanisms.reduced import reduced
from attn_variants.mechanisms.rope import RotaryAttention
from attn_variants.mechanisms.scores.family import scores
from attn_variants.mechanisms.sliding_window import SlidingWindow
from attn_variants.mechanisms.sparse.family import sparse
from attn_variants.mechanisms.sparsemax import SparsemaxAttention


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """Every mechanism of the package."""
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
        *reduced(),
        *recurrences(),
        *memories(),
    ]


@hookimpl
def attn_kernels() -> list[Kernel]:
    """The kernels for `attend`."""
    return [Plain(), TorchSdpa(), BlockSparse()]


@hookimpl
def attn_spec_layers() -> list[Callable[..., Any]]:
    """The layer that computes any spec."""
    return [spec_layer]


def spec_layer(spec: AttentionSpec, config: MechanismConfig, inner: InnerAttention | None = None) -> Any:
    """A fresh `SpecLayer` with random weights around `inner`."""
    from attn_variants.layer import SpecLayer

    return SpecLayer(spec, width=config.width, bias=config.bias, inner=inner, borrows=config.borrows)
