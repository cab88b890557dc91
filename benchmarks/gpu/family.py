"""Verdicts of the softmax family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import correctness
from cases import RIGHT, SMALL


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Of every feature of every program once."""
    return correctness.verdicts(SMALL if small else RIGHT, device)
