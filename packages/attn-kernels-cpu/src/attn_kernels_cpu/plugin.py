"""The plugin hooks through which this package registers its kernels.

Nothing here imports torch, and nothing is compiled before a kernel is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core import hookimpl
from attn_core.kernels.base import Kernel
from attn_core.kernels.block import BlockKernel
from attn_core.kernels.linear import LinearKernel
from attn_core.plugins.hooks import Finding


@hookimpl
def attn_linears() -> list[LinearKernel]:
    """The kernels for linear layers, in every weight format."""
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
    """The kernels for sampling, for attention to cached rows and for training."""
    from attn_kernels_cpu.blocks import CpuLatent, CpuPaged
    from attn_kernels_cpu.sampling import CpuSampling
    from attn_kernels_cpu.training import (
        CpuActivation,
        CpuAttention,
        CpuCrossEntropy,
        CpuGate,
        CpuNorm,
        CpuProduct,
        CpuRotary,
        CpuRoundedProduct,
    )

    products = [CpuProduct(), CpuRoundedProduct()]
    rowwise = [CpuNorm(), CpuGate(), CpuRotary(), CpuCrossEntropy()]
    return [CpuSampling(), CpuPaged(), CpuLatent(), *products, CpuActivation(), CpuAttention(), *rowwise]


@hookimpl
def attn_versions() -> list[str]:
    """The instruction set of the kernels on this machine."""
    from attn_kernels_cpu.chip import statement

    return [statement()]


@hookimpl
def attn_doctor_checks() -> list[Callable[[], list[Finding]]]:
    """Whether the kernels can be loaded; they are compiled for that if the wheel has none for this processor."""
    return [_loads]


def _loads() -> list[Finding]:
    from attn_kernels_cpu.chip import statement
    from attn_kernels_cpu.library import trouble

    why = trouble()
    detail = statement().partition(": ")[2] if why is None else f"PyTorch computes instead: {why}"
    return [Finding(subject="cpu kernels", ok=why is None, detail=detail)]


@hookimpl
def attn_blocks() -> list[BlockKernel]:
    """The kernel for whole pre-norm decoder blocks."""
    from attn_kernels_cpu.blocks import CpuBlock

    return [CpuBlock()]
