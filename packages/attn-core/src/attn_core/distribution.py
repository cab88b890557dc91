"""Distribution functions α = g(e) over the allowed keys, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How scores become weights. `kind` is the word kernels accept or refuse."""

    kind: ClassVar[str]
    equation: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Softmax(Distribution):
    """exp(e - max e) / Σ."""

    kind = "softmax"
    equation = r"\mathrm{softmax}(e)"


@dataclass(frozen=True, kw_only=True)
class Sparsemax(Distribution):
    """The Euclidean projection of e onto the simplex (Martins and Astudillo 2016, arXiv 1602.02068)."""

    kind = "sparsemax"
    equation = r"\arg\min_{p \in \Delta} \lVert p - e \rVert^2"
