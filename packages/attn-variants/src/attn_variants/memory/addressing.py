"""Where a head of a Neural Turing Machine looks: by content, then by location (Graves et al. 2014, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER_ZERO = 1e-8
LEAST = 1e-16
"""Added before a power is taken: a weight of zero has no logarithm to differentiate."""


def by_content(key: Tensor, memory: Tensor, strength: Tensor) -> Tensor:
    """w^c = softmax(β cos(k, M_i)) [..., heads, slots] (equations 5 and 6).

    `key` [..., heads, size], `memory` [..., slots, size], `strength` β [..., heads], not negative.
    """
    lengths = torch.linalg.vector_norm(key, dim=-1)[..., None] * torch.linalg.vector_norm(memory, dim=-1)[..., None, :]
    cosines = (key @ memory.transpose(-1, -2)) / (lengths + NEVER_ZERO)
    return torch.softmax(strength[..., None] * cosines, dim=-1)


def interpolated(content: Tensor, before: Tensor, gate: Tensor) -> Tensor:
    """w^g = g w^c + (1 - g) w_{t-1} (equation 7); weights [..., heads, slots], `gate` [..., heads] from 0 to 1."""
    return gate[..., None] * content + (1 - gate[..., None]) * before


def shifted(weights: Tensor, shifts: Tensor) -> Tensor:
    """w̃(i) = Σ_o s(o) w(i - o), around the ends (equation 8).

    `shifts` [..., heads, 2 r + 1] are the shares of the shifts -r to r.
    """
    reach = shifts.shape[-1] // 2
    moved = [torch.roll(weights, by, dims=-1) * shifts[..., by + reach, None] for by in range(-reach, reach + 1)]
    return torch.stack(moved).sum(0)


def sharpened(weights: Tensor, power: Tensor) -> Tensor:
    """w^γ / Σ w^γ (equation 9); `power` γ [..., heads], at least 1."""
    raised = (weights + LEAST) ** power[..., None]
    return raised / raised.sum(-1, keepdim=True)
