"""The plugin hooks of this package. Importing this module imports neither torch nor any mechanism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core import AttentionSpec, InnerAttention, Kernel, Mechanism, MechanismConfig, hookimpl
from attn_core.plugins.hooks import Command


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this package."""
    from attn_variants.mechanisms.offered import offered

    return offered()


@hookimpl
def attn_kernels() -> list[Kernel[Any]]:
    """The kernels for `attend`, for attention over selected blocks, and for linear recurrences."""
    from attn_variants.kernels.attend import Banded, BlockSparse, Plain, TorchSdpa
    from attn_variants.kernels.recurrence import PlainChunked, PlainRecurrent
    from attn_variants.kernels.selected import SelectedBlocksTiled, SelectedBlocksWhole
    from attn_variants.kernels.torch_cuda import TorchCudnn, TorchEfficient, TorchFlash, TorchFlex
    from attn_variants.kernels.whole import WholeDropped

    attention = [Plain(), TorchSdpa(), BlockSparse(), Banded(), WholeDropped()]
    on_gpu = [TorchCudnn(), TorchFlash(), TorchEfficient(), TorchFlex()]
    return [*attention, *on_gpu, SelectedBlocksTiled(), SelectedBlocksWhole(), PlainChunked(), PlainRecurrent()]


@hookimpl
def attn_commands() -> list[Command]:
    """The command `attn tune`."""
    summary = "Measure the attention kernels on this machine's GPU."
    return [Command(name="tune", summary=summary, target="attn_variants.commands:tune")]


@hookimpl
def attn_spec_layers() -> list[Callable[..., Any]]:
    """The factory of the layer that computes any spec."""
    return [spec_layer]


def spec_layer(spec: AttentionSpec, config: MechanismConfig, inner: InnerAttention | None = None) -> Any:
    """Build a `SpecLayer` around `inner`, with randomly initialised weights."""
    from attn_variants.attention.layer import SpecLayer

    layer = SpecLayer(
        spec,
        hidden_size=config.hidden_size,
        bias=config.bias,
        inner=inner,
        shares_kv=config.shares_kv,
        dropout=config.dropout,
    )
    if config.has_output_bias != config.bias:
        layer.replace_output(bias=config.has_output_bias)
    return layer
