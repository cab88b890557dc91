"""Rotary positions on queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.rotary.scaling import RotaryScaling


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions on queries and keys (Su et al. 2021, arXiv 2104.09864).

    `fraction` of each head is rotated; `interleaved` pairs (0, 1), (2, 3), ... as in the paper, otherwise the
    first half with the second, as in Llama checkpoints. `scaling` stretches the positions to longer sequences.
    """

    base: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: RotaryScaling | None = None

    def frequencies(self, rotated: int) -> list[float]:
        """Angle per position of each of the `rotated` / 2 pairs, in radians."""
        if self.scaling is not None:
            return self.scaling.frequencies(self.base, rotated)
        return [self.base ** (-2 * pair / rotated) for pair in range(rotated // 2)]

    @property
    def attention_factor(self) -> float:
        """What turned queries and keys are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor
