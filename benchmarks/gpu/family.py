"""Verdicts on softmax attention: every feature of every kernel is checked once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases import BANDS, BANDS_OF_128, BANDS_OF_SIZES, LEARNED, LISTED, PACKED, SMALL
from correctness import verdicts


def bands(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on band masks (causal, windows)."""
    return verdicts(SMALL["bands"] if small else BANDS, device)


def bands_of_128(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on band masks with head size 128."""
    return verdicts(SMALL["bands_of_128"] if small else BANDS_OF_128, device)


def bands_of_sizes(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on band masks with other head sizes and element types."""
    return verdicts(SMALL["bands_of_sizes"] if small else BANDS_OF_SIZES, device)


def varlen(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on packed texts (varlen)."""
    return verdicts(SMALL["varlen"] if small else PACKED, device)


def listed(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on masks that are processed by lists of blocks."""
    return verdicts(SMALL["listed"] if small else LISTED, device)


def learned(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on learned biases and dropout."""
    return verdicts(SMALL["learned"] if small else LEARNED, device)
