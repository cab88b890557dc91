"""The states of random generators as tensors, so that a resumed run draws what the interrupted one would have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_states(data: torch.Generator) -> dict[str, Tensor]:
    """The states, uint8 each, of the generator of batches and of those that dropout draws from, by name."""
    states = {"data": data.get_state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(data: torch.Generator, states: Mapping[str, Tensor]) -> None:
    """Put back what `random_states` gave; a device that is no longer there is left out."""
    data.set_state(states["data"])
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
