"""What this package offers. Imports no torch and compiles nothing before a kernel is used."""

from __future__ import annotations

from typing import Any

from attn_core import hookimpl
from attn_core.kernels.base import Kernel
from attn_core.kernels.block import BlockKernel
from attn_core.kernels.linear import LinearKernel


@hookimpl
def attn_linears() -> list[LinearKernel]:
    """Linear layers in every format of weights."""
    from attn_kernels_cpu.linears import (
        AmxBfloat16,
        AmxInt4,
        AmxInt8,
        AmxRoundedBfloat16,
        CpuBfloat16,
        CpuFloat32,
        CpuInt4,
        CpuInt8,
        in_blocks,
    )

    floats = [CpuFloat32(), CpuBfloat16(), AmxBfloat16(), AmxRoundedBfloat16()]
    return [*floats, CpuInt8(), AmxInt8(), CpuInt4(), AmxInt4(), *in_blocks()]


@hookimpl
def attn_kernels() -> list[Kernel[Any]]:
    """What chooses tokens, and kernels of training."""
    from attn_kernels_cpu.sampling import CpuSampling
    from attn_kernels_cpu.training import CpuActivation, CpuAttention, CpuProduct, CpuRoundedProduct

    return [CpuSampling(), CpuProduct(), CpuRoundedProduct(), CpuActivation(), CpuAttention()]


@hookimpl
def attn_versions() -> list[str]:
    """The instruction set of the kernels here."""
    from attn_kernels_cpu.chip import statement

    return [statement()]


@hookimpl
def attn_blocks() -> list[BlockKernel]:
    """Whole pre-norm blocks."""
    from attn_kernels_cpu.blocks import CpuBlock

    return [CpuBlock()]
