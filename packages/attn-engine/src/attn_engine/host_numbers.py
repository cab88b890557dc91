"""Numbers of the host that a step needs on its device: collected, then sent by one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

WORD = 8
"""Bytes at a multiple of which every part begins."""


class HostNumbers:
    """Parts by name, which `send` lays end to end.

    A GPU reads them from pinned memory: a copy of other memory, or one at a time, would make the host wait for all that
    the device was asked before.
    """

    def __init__(self) -> None:
        self._parts: dict[str, NDArray[Any]] = {}

    def add(self, name: str, numbers: ArrayLike, dtype: type[np.generic] = np.int64) -> None:
        """Add numbers of any shape; there may be none."""
        self._parts[name] = np.asarray(numbers, dtype=dtype)

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """All that was added, on the device, in its shapes and types; nothing is copied where there is nothing."""
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
    """Integers [values], int64, on a device, which the host does not wait for."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    numbers = HostNumbers()
    numbers.add("values", values)
    return numbers.send(device)["values"]


def fetched(parts: Sequence[Tensor]) -> list[list[Any]]:
    """The numbers of tensors [n] of one device, by one copy back; of different types they come as float64."""
    return apart(joined(parts).tolist(), [len(part) for part in parts])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [n] of one device end to end, as float64 where their types differ."""
    if len(parts) == 1:
        return parts[0]
    alike = len({part.dtype for part in parts}) == 1
    return torch.cat([part if alike else part.double() for part in parts])


def apart(numbers: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Parts of these lengths of numbers that lie end to end."""
    ends = list(accumulate(lengths, initial=0))
    return [list(numbers[start:end]) for start, end in pairwise(ends)]
