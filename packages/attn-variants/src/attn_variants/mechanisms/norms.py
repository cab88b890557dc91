"""Attention that normalises queries and keys or bounds its scores: QK-norm, soft caps, Gemma."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper, Rotary
from attn_core.checks import checked, require_choice, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.masks import Chunked
from attn_core.modifiers import Modifier, ScoreFunction, SoftCap
from attn_core.norms import QkL2Norm, QkNorm, QkNormAllHeads, QkvNorm
from attn_core.rotary import rotary_scaling
from attn_core.scores import Dot, ScaledDot

from attn_variants.mechanisms.common import GROUPED_SELF, self_attention, window_mask

QK_NORM = Paper(title="Query-Key Normalization for Transformers", authors="Henry et al.", year=2020, arxiv="2010.04245")


class QkNormAttention(DeclaredMechanism):
    """RMS-normalises the queries and keys of every head, with a learned gain per element."""

    name = "qk_norm"
    summary = "queries and keys are normalised in every head"
    used_by = ("Qwen3",)
    paper = QK_NORM
    equation = (
        r"O = \mathrm{softmax}\left(\frac{\hat Q \hat K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" \hat q = g_q \odot q / \mathrm{rms}(q),\quad"
        r" \hat k = g_k \odot k / \mathrm{rms}(k)"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`eps` is added to the mean square of a query or key."""

        eps: float = checked(1e-6, require_number, gt=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        eps = self.Config.of(config).eps
        return self_attention(config, norm=QkNorm(eps=eps))


class QkL2NormAttention(DeclaredMechanism):
    """Scores are cosine similarities of queries and keys, times one learned number in place of 1/√d_k."""

    name = "qk_l2_norm"
    summary = "L2-normalised queries and keys, with one learned scale"
    paper = QK_NORM
    equation = (
        r"O = \mathrm{softmax}\left(g\, \hat Q \hat K^\top + M\right) V,\quad"
        r" \hat q = q / \lVert q \rVert,\quad \hat k = k / \lVert k \rVert"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`length` n is that of the training sequences: g is initialised to log₂(n² - n). `eps` is added to the squared
        L2 norm."""

        length: int = checked(1024, require_whole, ge=2, unit="tokens")
        eps: float = checked(1e-12, require_number, gt=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        own = self.Config.of(config)
        norm = QkL2Norm(eps=own.eps, length=own.length)
        return self_attention(own, score=Dot(), norm=norm)


class SoftCapAttention(DeclaredMechanism):
    """Bounds all scores smoothly by a cap, which keeps the softmax from saturating."""

    name = "soft_cap"
    summary = "scores are bounded by a tanh soft cap"
    paper = Paper(
        title="Gemma 2: Improving Open Language Models at a Practical Size",
        authors="Gemma Team",
        year=2024,
        arxiv="2408.00118",
    )
    equation = r"O = \mathrm{softmax}\left(c \tanh\left(\frac{Q K^\top}{c \sqrt{d_k}}\right) + M\right) V"
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`cap` c bounds the absolute values of the scores."""

        cap: float = checked(50.0, require_number, gt=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        cap = self.Config.of(config).cap
        return self_attention(config, modifiers=(SoftCap(cap=cap),))


NORMED = {"head": QkNorm, "all_heads": QkNormAllHeads}


@dataclass(frozen=True)
class QueryTemperature:
    """Multiplies scores of a query at position i by 1 + a ln(1 + ⌊(i + 1) / floor⌋), a = `scale` (Nakanishi 2025)."""

    scale: float
    floor: int

    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG002 -- the same for both
        """The scaled scores [batch, heads, query, key] for queries at positions `query`."""
        steps = ((query + 1) // self.floor + 1).to(score.dtype)
        return score * (1 + self.scale * steps.log())


class GemmaAttention(DeclaredMechanism):
    """Attention with optional QK-norm, soft cap, window or chunks, scale and rotary base, so that layers of one model
    differ only by their options."""

    name = "gemma"
    summary = "query-key norm, soft cap, window, scale and rotary base, configurable per layer"
    used_by = ("Gemma 2", "Gemma 3")
    paper = Paper(title="Gemma 3 Technical Report", authors="Gemma Team", year=2025, arxiv="2503.19786")
    equation = (
        r"O = \mathrm{softmax}\left(c \tanh\left(\frac{s\, R \hat Q (R \hat K)^\top}{c}\right) + M\right) V,\quad"
        r" \hat q = g_q \odot q / \mathrm{rms}(q),\quad"
        r" M_{ij} = 0 \text{ if } 0 \le i - j < w \text{ else } -\infty"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """Options that are None are not used: `norm_eps` of the QK-norms (Gemma 3, Qwen 3), `cap` c of the scores
        (Gemma 2), `window` w, the number of visible tokens including the query's own. `scale` s replaces 1/√d_k. Norms
        are taken over each "head" or over "all_heads" together (OLMo 2), by `norm_over`; with `norm_values` those of
        values, without a gain, over each head, too (Gemma 4). With `chunk`, the sequence is
        cut into chunks of this many tokens, and a query sees only its own (Llama 4); this excludes a window.
        `temperature` a multiplies the scores of the query at position i by
        1 + a ln(1 + ⌊(i + 1) / `temperature_floor`⌋) (Llama 4; arXiv 2501.19399).

        If the model has a rotary embedding, `base` and `scaling` (as in `rope`) replace the model's in this layer.
        """

        norm_eps: float | None = checked(1e-6, require_number, gt=0, optional=True)
        norm_over: str = checked("head", require_choice, NORMED)
        norm_values: bool = False
        cap: float | None = checked(None, require_number, gt=0, optional=True)
        window: int | None = checked(None, require_whole, ge=1, unit="tokens", optional=True)
        chunk: int | None = checked(None, require_whole, ge=1, unit="tokens", optional=True)
        temperature: float | None = checked(None, require_number, gt=0, optional=True)
        temperature_floor: int = checked(8192, require_whole, ge=1, unit="tokens")
        scale: float | None = checked(None, require_number, gt=0, optional=True)
        base: float | None = checked(None, require_number, gt=1, optional=True)
        scaling: Mapping[str, Any] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.norm_values and (self.norm_eps is None or self.norm_over != "head"):
                allowed = "False, unless queries and keys are normalised over each head"
                raise InvalidValue.of("norm_values", self.norm_values, allowed)
            if self.window is not None and self.chunk is not None:
                raise InvalidValue.of("chunk", self.chunk, "None together with a window")
            for name in ("base", "scaling"):
                if self.rotary is None and getattr(self, name) is not None:
                    raise InvalidValue.of(name, getattr(self, name), "None in a model without rotary positions")
            _ = self.turned

        @property
        def norm_kind(self) -> type[QkNorm]:
            """The kind of the norms."""
            return QkvNorm if self.norm_values else NORMED[self.norm_over]

        @property
        def turned(self) -> Rotary | None:
            """The rotary embedding of the layer; None if the model has none."""
            if self.rotary is None:
                return None
            own: dict[str, Any] = {} if self.base is None else {"base": self.base}
            if self.scaling is not None:
                own["scaling"] = rotary_scaling(self.scaling)
            return dataclasses.replace(self.rotary, **own)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        own = self.Config.of(config)
        modifiers: list[Modifier] = [] if own.cap is None else [SoftCap(cap=own.cap)]
        if own.temperature is not None:
            modifiers.append(ScoreFunction(QueryTemperature(own.temperature, own.temperature_floor)))
        mask = window_mask(own, own.window)
        return AttentionSpec(
            heads=own.head_layout,
            score=ScaledDot(scale=own.scale),
            modifiers=tuple(modifiers),
            mask=mask if own.chunk is None else mask & Chunked(size=own.chunk),
            norm=None if own.norm_eps is None else own.norm_kind(eps=own.norm_eps),
            rotary=own.turned,
        )
