"""Distribution functions α = g(e) over the allowed keys, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attn_core.errors import InvalidValue
from attn_core.heads import Heads, Part


@dataclass(frozen=True, kw_only=True)
class Distribution(Part):
    """A function from scores to attention weights. `located` says that it depends on the positions of the keys."""

    equation: ClassVar[str]
    located: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Softmax(Distribution):
    """exp(e - max e) / Σ."""

    kind = "softmax"
    equation = r"\mathrm{softmax}(e)"


@dataclass(frozen=True, kw_only=True)
class SoftmaxOne(Distribution):
    """exp(e) / (1 + Σ exp(e)): a head may attend to nothing ("softmax off by one"); `SoftmaxWithSink` with logit 0."""

    kind = "softmax_one"
    equation = r"\exp(e_j) / (1 + \textstyle\sum_k \exp(e_k))"


@dataclass(frozen=True, kw_only=True)
class SoftmaxWithSink(Distribution):
    """exp(e) / (exp(s_h) + Σ exp(e)) with a learned logit s_h per head (gpt-oss, arXiv 2508.10925): `logit` [heads]."""

    kind = "sink"
    equation = r"\exp(e_j) / (\exp(s_h) + \textstyle\sum_k \exp(e_k))"

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"logit": (heads.query,)}


@dataclass(frozen=True, kw_only=True)
class Sigmoid(Distribution):
    """σ(e - ln n) of each score by itself, n the number of keys that the query may see (arXiv 2409.04431).

    The paper's n is the length of the sequence. Counting the keys that a query may see gives the same weights for whole
    sequences and for decoding token by token, and ignores padding.
    """

    kind = "sigmoid"
    equation = r"\sigma(e_j - \ln n)"


@dataclass(frozen=True, kw_only=True)
class Sparsemax(Distribution):
    """The Euclidean projection of e onto the simplex (Martins and Astudillo 2016, arXiv 1602.02068)."""

    kind = "sparsemax"
    equation = r"\arg\min_{p \in \Delta} \lVert p - e \rVert^2"


@dataclass(frozen=True, kw_only=True)
class Entmax(Distribution):
    """[(α - 1) e - τ]₊^(1/(α - 1)), τ such that the sum is 1 (Peters et al. 2019, arXiv 1905.05702).

    α = 2 is sparsemax; towards α = 1 it becomes softmax.
    """

    alpha: float = 1.5
    kind = "entmax"
    equation = r"\left[(\alpha - 1) e - \tau\right]_+^{1/(\alpha - 1)}"

    def __post_init__(self) -> None:
        if not 1 < self.alpha <= 32:
            raise InvalidValue.of("entmax.alpha", self.alpha, "a number above 1, at most 32 (softmax is the limit 1)")


@dataclass(frozen=True, kw_only=True)
class AdaptiveEntmax(Distribution):
    """α-entmax with a learned α per head (Correia et al. 2019, arXiv 1909.00015): α = 1 + σ(`shape`), `shape` [heads].

    α stays between 1.01, nearly softmax, and 2, sparsemax.
    """

    kind = "adaptive_entmax"
    equation = r"\left[(\alpha_h - 1) e - \tau\right]_+^{1/(\alpha_h - 1)}"

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"shape": (heads.query,)}


@dataclass(frozen=True, kw_only=True)
class Hard(Distribution):
    """One for the key of the largest score, the first of equals, else zero (Xu et al. 2015, arXiv 1502.03044).

    It is piecewise constant, so that its gradient with respect to the scores is zero.
    """

    kind = "hard"
    equation = r"[j = \arg\max_k e_k]"


@dataclass(frozen=True, kw_only=True)
class LocalGaussian(Distribution):
    """Local-p (Luong et al. 2015, arXiv 1508.04025): softmax within p ± D, times exp(-(j - p)² / 2σ²), σ = D/2.

    p = n σ(vᵀ tanh(W q)) is the predicted centre of the window, n the number of keys that the query may see. As in the
    paper, weights are not normalised afterwards. `weight` [heads, key_size, key_size], `vector` [heads, key_size].
    """

    radius: int = 10
    kind = "local_gaussian"
    equation = r"\mathrm{softmax}_{|j - p| \le D}(e)_j \exp\left(-\frac{(j - p)^2}{2 (D/2)^2}\right)"
    located = True

    def __post_init__(self) -> None:
        if self.radius < 1:
            raise InvalidValue.of("local_gaussian.radius", self.radius, "a whole number of positions from 1")

    def query_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size * (heads.key_size + 1)

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (heads.query, heads.key_size, heads.key_size), "vector": (heads.query, heads.key_size)}


@dataclass(frozen=True, kw_only=True)
class StickBreaking(Distribution):
    """σ(e_j) Π_{k > j} (1 - σ(e_k)) over the allowed keys k at later positions (Tan et al. 2024, arXiv 2410.17980).

    A stick of length one is broken at every key, the latest first; the weights sum to at most one.
    """

    kind = "stick_breaking"
    equation = r"\sigma(e_j) \textstyle\prod_{k > j} (1 - \sigma(e_k))"
    located = True
