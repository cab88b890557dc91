"""Conditions that the kernels of this package have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_kernels_triton.machine import interpreted

MAX_HEAD_DIM_DROPOUT = 128
"""Sizes of heads up to which attention weights can be dropped: the masks of larger ones leave no registers."""

MAX_HEAD_DIM_LEARNED_BIAS = 128
"""Sizes of heads up to which biases can be learned."""

MAX_KEY_SIZE, MAX_KEY_SIZE_PER_CHANNEL = 256, 128
"""Sizes of keys up to which the state of a recurrence stays in registers: bfloat16 with one decay a head; all else."""

FP8_CAPABILITY = (8, 9)
"""The compute capability of the first GPUs that know e4m3."""

MAX_NORM_ROW = 8192
"""Elements of a row up to which one program of RMSNorm keeps all of them in registers, forward and backward."""


@dataclass(frozen=True)
class OnGpu:
    """A GPU; where Triton interprets programs, the CPU too."""

    def refuses(self, value: Any) -> str | None:
        """Why the device is refused, or None if it is accepted."""
        if value == "cuda" or (value == "cpu" and interpreted()):
            return None
        return f"{value!r} is not of 'cuda'"


@dataclass(frozen=True)
class InOrder:
    """A tuple with each of these words at most once; those of a stage in any order, the stages in this one."""

    stages: tuple[tuple[str, ...], ...]

    def refuses(self, value: Any) -> str | None:
        """Why the tuple is refused, or None if it is accepted."""
        stage = {word: number for number, words in enumerate(self.stages) for word in words}
        places = [stage.get(word, -1) for word in value]
        if -1 not in places and places == sorted(places) and len(set(value)) == len(value):
            return None
        allowed = ", then ".join(" and ".join(words) for words in self.stages)
        return f"{value!r} is not some of {allowed}, each once"


MODIFIERS = InOrder((("soft_cap",), ("alibi", "t5_bias", "relative_bias")))
"""Changes of scores that programs know."""

LATENT_MODIFIERS = InOrder((("soft_cap",), ("alibi",)))
"""Those that programs over latents have registers for."""
