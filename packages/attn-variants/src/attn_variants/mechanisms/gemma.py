"""The attention of Gemma 2, Gemma 3 and Qwen 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper, Rotary, Window
from attn_core.errors import InvalidValue
from attn_core.modifiers import SoftCap
from attn_core.norms import QkNorm
from attn_core.rotary import rotary_scaling
from attn_core.scores import ScaledDot

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_number, check_whole


class GemmaAttention(DeclaredMechanism):
    """Normed queries and keys, capped scores, a window, a scale and rotary angles of the layer's own, each where it is
    asked for: layers of one model differ by options alone."""

    name = "gemma"
    summary = "norm, cap, window, scale and rotary base chosen layer by layer"
    paper = Paper(title="Gemma 3 Technical Report", authors="Gemma Team", year=2025, arxiv="2503.19786")
    equation = (
        r"O = \mathrm{softmax}\left(c \tanh\left(\frac{s\, R \hat Q (R \hat K)^\top}{c}\right) + M\right) V,\quad"
        r" \hat q = g_q \odot q / \mathrm{rms}(q),\quad"
        r" M_{ij} = 0 \text{ if } 0 \le i - j < w \text{ else } -\infty"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """What is None is left out: `norm_eps` of the norms (Gemma 3, Qwen 3), `cap` c of the scores (Gemma 2), the
        `window` w of tokens, the query's own among them. `scale` s replaces 1/√d_k.

        Where the model turns positions, `base` and `scaling` (as of `rope`) replace the model's in this layer.
        """

        norm_eps: float | None = 1e-6
        cap: float | None = None
        window: int | None = None
        scale: float | None = None
        base: float | None = None
        scaling: Mapping[str, Any] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("norm_eps", "cap", "scale"):
                if getattr(self, name) is not None:
                    check_number(name, getattr(self, name), above=0)
            if self.window is not None:
                check_whole("window", self.window, "tokens")
            if self.base is not None:
                check_number("base", self.base, above=1)
            for name in ("base", "scaling"):
                if self.rotary is None and getattr(self, name) is not None:
                    raise InvalidValue.of(name, getattr(self, name), "none where the model turns no positions")
            _ = self.turned

        @property
        def turned(self) -> Rotary | None:
            """The layer's rotary positions."""
            if self.rotary is None:
                return None
            own: dict[str, Any] = {} if self.base is None else {"base": self.base}
            if self.scaling is not None:
                own["scaling"] = rotary_scaling(self.scaling)
            return dataclasses.replace(self.rotary, **own)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        own = self.Config.of(config)
        return AttentionSpec(
            heads=own.head_layout,
            score=ScaledDot(scale=own.scale),
            modifiers=() if own.cap is None else (SoftCap(cap=own.cap),),
            mask=self_mask(own) if own.window is None else _window(own.window, causal=own.causal),
            norm=None if own.norm_eps is None else QkNorm(eps=own.norm_eps),
            rotary=own.turned,
        )


def _window(size: int, *, causal: bool) -> Window:
    return Window(left=size - 1) if causal else Window(left=size // 2, right=size // 2)
