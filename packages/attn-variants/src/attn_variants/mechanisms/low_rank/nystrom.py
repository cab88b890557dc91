"""Nyströmformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Cost, MechanismConfig, Paper, Shape
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.whole_sequence import ENCODER, WholeSequence


class NystromAttention(WholeSequence):
    """The matrix of softmax attention is approximated from the rows and columns of a few landmarks.

    Landmarks are means of equal stretches of the real tokens, so what they are depends on the length: there is no
    causal form. With as many landmarks as tokens it is softmax attention, as far as the inverse has converged.
    """

    name = "nystrom"
    summary = "softmax attention through landmarks and the inverse of their attention"
    paper = Paper(
        title="Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
        authors="Xiong et al.",
        year=2021,
        arxiv="2102.03902",
    )
    equation = (
        r"o = \mathrm{softmax}(Q \tilde K^\top)\, \mathrm{softmax}(\tilde Q \tilde K^\top)^{+}\,"
        r" \mathrm{softmax}(\tilde Q K^\top) V + \mathrm{conv}(V)"
    )
    sketch: ClassVar = {"landmarks": 4, "kernel": 3}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`landmarks`; `iterations` of the inverse; tokens of the convolution's `kernel`, odd, 0 for none."""

        landmarks: int = 64
        iterations: int = 6
        kernel: int = 33

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("landmarks", self.landmarks, "rows")
            check_whole("iterations", self.iterations, "steps")
            if self.kernel != 0 and (self.kernel < 0 or self.kernel % 2 != 1):
                raise InvalidValue.of("kernel", self.kernel, "an odd number of tokens, or 0 for no convolution")

    def attention(self, config: MechanismConfig) -> Any:
        """Landmarks, and a convolution, if any."""
        from attn_variants.mechanisms.low_rank.layers import Landmarks

        options = self.Config.of(config)
        return Landmarks(
            heads=config.heads,
            landmarks=options.landmarks,
            iterations=options.iterations,
            kernel=options.kernel or None,
        )

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Tokens meet landmarks four times; landmarks meet each other in every step of the inverse."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        marks, tokens = options.landmarks, shape.query
        between = 4 * tokens * marks * size + tokens * marks**2
        among = marks**2 * size + 4 * options.iterations * marks**3
        inner = 2 * shape.batch * heads * (between + among + tokens * size * options.kernel)
        flops = self.projected(config, shape) + inner
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config) + heads * options.kernel)
