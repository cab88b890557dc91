"""Conditions and size limits that the kernels of this package share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.kernels.base import OneOf

from attn_kernels_triton.machine import has_triton, interpreted

MAX_HEAD_DIM_DROPOUT = 128
"""The largest head size with attention dropout: beyond it, the dropout mask leaves too few registers."""

MAX_HEAD_DIM_LEARNED_BIAS = 128
"""The largest head size with learned biases."""

MAX_KEY_SIZE, MAX_KEY_SIZE_PER_CHANNEL = 256, 128
"""The largest key sizes for which the state of a recurrence fits into registers: bfloat16 with one decay per head; all
other cases."""

FP8_CAPABILITY = (8, 9)
"""The lowest compute capability of GPUs that support e4m3."""

MAX_NORM_ROW = 8192
"""The longest row that one program of RMSNorm keeps in registers, forward and backward."""


@dataclass(frozen=True)
class OnGpu:
    """The device is a GPU, or the CPU if Triton runs in interpreter mode."""

    def refuses(self, value: Any) -> str | None:
        """Why the device is refused, or None if it is accepted."""
        if value == "cuda" or (value == "cpu" and interpreted()):
            return None
        return f"{value!r} is not 'cuda'"


@dataclass(frozen=True)
class Computable:
    """One of these dtypes, unless Triton interprets kernels and its interpreter computes the type wrongly."""

    allowed: OneOf

    def refuses(self, value: Any) -> str | None:
        """Why the dtype is refused, or None if it is accepted."""
        refused = self.allowed.refuses(value)
        if refused or not interpreted() or not has_triton():
            return refused
        from attn_kernels_triton.interpreter import multiplies

        if multiplies(str(value)):
            return None
        return f"{value!r} is computed wrongly by Triton's interpreter; unset TRITON_INTERPRET, or use 'float32'"


@dataclass(frozen=True)
class InOrder:
    """A tuple that contains each of these words at most once: stages in this order, words of a stage in any order."""

    stages: tuple[tuple[str, ...], ...]

    def refuses(self, value: Any) -> str | None:
        """Why the tuple is refused, or None if it is accepted."""
        stage = {word: number for number, words in enumerate(self.stages) for word in words}
        places = [stage.get(word, -1) for word in value]
        if -1 not in places and places == sorted(places) and len(set(value)) == len(value):
            return None
        allowed = ", then ".join(" and ".join(words) for words in self.stages)
        return f"{value!r} is not a sequence of {allowed}, each at most once"


MODIFIERS = InOrder((("soft_cap",), ("alibi", "t5_bias", "relative_bias")))
"""The score modifiers that the attention kernels support, in the order in which they apply them."""

LATENT_MODIFIERS = InOrder((("soft_cap",), ("alibi",)))
"""The score modifiers that the kernels over latents support; others would need too many registers."""
