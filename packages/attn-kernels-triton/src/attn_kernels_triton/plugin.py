"""The plugin hooks through which this package registers its kernels. Nothing here imports torch or triton."""

from __future__ import annotations

from typing import Any

from attn_core import Kernel, hookimpl
from attn_core.kernels.linear import LinearKernel


@hookimpl
def attn_kernels() -> list[Kernel[Any]]:
    """The Triton kernels for attention, recurrences and row-wise operations on GPUs."""
    from attn_kernels_triton.backends.attend import TritonAttend
    from attn_kernels_triton.backends.paged import TritonLatent, TritonPaged
    from attn_kernels_triton.backends.recurrence import TritonChunked, TritonRecurrent
    from attn_kernels_triton.backends.recurrent_step import TritonRecurrentStep
    from attn_kernels_triton.backends.rowwise import TritonCrossEntropy, TritonGate, TritonRmsNorm, TritonRotary

    attention: list[Kernel[Any]] = [TritonAttend(), TritonPaged(), TritonLatent()]
    rowwise: list[Kernel[Any]] = [TritonRmsNorm(), TritonRotary(), TritonGate(), TritonCrossEntropy()]
    return [*attention, TritonChunked(), TritonRecurrent(), TritonRecurrentStep(), *rowwise]


@hookimpl
def attn_linears() -> list[LinearKernel]:
    """The kernels for linear layers with quantized weights (int8, int4, FP8 and the block formats of files)."""
    from attn_kernels_triton.backends.linears import TritonInt4, TritonInt8, in_blocks
    from attn_kernels_triton.backends.linears_fp8 import in_fp8

    return [TritonInt8(), TritonInt4(), *in_fp8(), *in_blocks()]
