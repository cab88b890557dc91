"""Verdicts of the softmax family, of every feature of every program once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases import BANDS, BANDS_OF_128, BANDS_OF_SIZES, LEARNED, LISTED, PACKED, SMALL
from correctness import verdicts


def bands(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Of masks that are bands."""
    return verdicts(SMALL["bands"] if small else BANDS, device)


def bands_of_128(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Of such masks over heads of 128."""
    return verdicts(SMALL["bands_of_128"] if small else BANDS_OF_128, device)


def bands_of_sizes(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Of such masks over heads of other sizes and types of elements."""
    return verdicts(SMALL["bands_of_sizes"] if small else BANDS_OF_SIZES, device)


def varlen(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Of packed texts."""
    return verdicts(SMALL["varlen"] if small else PACKED, device)


def listed(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Of masks that are met by lists."""
    return verdicts(SMALL["listed"] if small else LISTED, device)


def learned(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Of learned biases and of dropout."""
    return verdicts(SMALL["learned"] if small else LEARNED, device)
