"""Transfers the numbers that a step needs from the host to its device, collected into one non-blocking copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

WORD = 8
"""The alignment of every part in the buffer, in bytes."""


class HostNumbers:
    """Named arrays, which `send` concatenates into one buffer.

    For a GPU the buffer is in pinned memory: a copy from pageable memory would block the host until the device has done
    all work queued before it.
    """

    def __init__(self) -> None:
        self._parts: dict[str, NDArray[Any]] = {}

    def add(self, name: str, numbers: ArrayLike, dtype: type[np.generic] = np.int64) -> None:
        """Add an array of any shape, which may be empty."""
        self._parts[name] = np.asarray(numbers, dtype=dtype)

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """Copy all arrays to the device; returns them by name, with their shapes and dtypes."""
        words = {name: -(-part.nbytes // WORD) for name, part in self._parts.items()}
        here = torch.empty(sum(words.values()), dtype=torch.int64, pin_memory=device.type == "cuda")
        written = here.numpy()
        start = 0
        for name, part in self._parts.items():
            written[start : start + words[name]].view(part.dtype)[: part.size] = part.reshape(-1)
            start += words[name]
        there = here.to(device, non_blocking=True) if len(here) else here
        found, start = dict[str, Tensor](), 0
        for name, part in self._parts.items():
            line = there[start : start + words[name]] if part.size else torch.empty(0, dtype=torch.int64, device=device)
            dtype = torch.from_numpy(np.empty(0, part.dtype)).dtype
            found[name] = line.view(dtype)[: part.size].view(part.shape)
            start += words[name]
        return found


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers to a device as int64 [values], without blocking the host."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    numbers = HostNumbers()
    numbers.add("values", values)
    return numbers.send(device)["values"]


def fetched(parts: Sequence[Tensor]) -> list[list[Any]]:
    """The values of tensors [n] of one device, by one blocking copy to the host; as float64 if their dtypes differ."""
    return split_parts(concatenated(parts).tolist(), [len(part) for part in parts])


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors [n] of one device, as float64 if their dtypes differ."""
    if len(parts) == 1:
        return parts[0]
    alike = len({part.dtype for part in parts}) == 1
    return torch.cat([part if alike else part.double() for part in parts])


def split_parts(numbers: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Split concatenated numbers into parts of these lengths."""
    ends = list(accumulate(lengths, initial=0))
    return [list(numbers[start:end]) for start, end in pairwise(ends)]
