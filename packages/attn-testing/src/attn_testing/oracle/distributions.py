"""Attention distributions, computed by their definitions."""

from __future__ import annotations

import math

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.distributions import AdaptiveEntmax, Entmax, LocalGaussian, StickBreaking
from torch import Tensor
from torch.nn.functional import one_hot

from attn_testing.oracle.entmax import entmax
from attn_testing.oracle.pairing import places, weights_of

DISTRIBUTIONS = (
    "softmax",
    "softmax_one",
    "sink",
    "sigmoid",
    "sparsemax",
    "entmax",
    "adaptive_entmax",
    "hard",
    "local_gaussian",
    "stick_breaking",
)


def attention_weights(spec: AttentionSpec, energies: Tensor, allowed: Tensor, operands: AttentionInputs) -> Tensor:
    """The attention weights for scores [batch, heads, query, key]; `allowed` is bool of the same shape."""
    given, kind = spec.distribution, spec.distribution.kind
    if kind in {"softmax_one", "sink"}:
        logit = weights_of(operands, "distribution").get("logit", energies.new_zeros(1))
        return beside(energies, allowed, logit)
    if isinstance(given, (Entmax, AdaptiveEntmax)):
        shape = weights_of(operands, "distribution").get("shape")
        alpha = energies.new_full((1,), given.alpha) if isinstance(given, Entmax) else 1 + torch.sigmoid(shape)  # type: ignore[arg-type]
        return entmax(energies, allowed, alpha[:, None, None])
    if isinstance(given, LocalGaussian):
        return local(given, energies, allowed, operands)
    if isinstance(given, StickBreaking):
        return stick_breaking(energies, allowed, places(operands)[1])
    return {"softmax": softmax, "sparsemax": sparsemax, "sigmoid": sigmoid, "hard": hard}[kind](energies, allowed)


def beside(energies: Tensor, allowed: Tensor, logit: Tensor) -> Tensor:
    """Softmax over the allowed keys and an attention sink with the score `logit` [heads], whose weight is dropped."""
    sink = logit[:, None, None].expand(*energies.shape[:-1], 1)
    masked = energies.masked_fill(~allowed, -math.inf)
    return torch.softmax(torch.cat([masked, sink], dim=-1), -1)[..., :-1]


def sigmoid(energies: Tensor, allowed: Tensor) -> Tensor:
    """Sigmoid attention: 1 / (1 + n exp(-e)), with n the number of allowed keys."""
    count = allowed.sum(-1, keepdim=True).to(energies.dtype)
    return torch.where(allowed, torch.sigmoid(energies - count.clamp(min=1).log()), 0.0)


def hard(energies: Tensor, allowed: Tensor) -> Tensor:
    """Hard attention: weight one for the first of the largest allowed scores."""
    chosen = energies.masked_fill(~allowed, -math.inf).argmax(-1)
    return one_hot(chosen, energies.shape[-1]).to(energies.dtype) * allowed.any(-1, keepdim=True)


def local(given: LocalGaussian, energies: Tensor, allowed: Tensor, operands: AttentionInputs) -> Tensor:
    """Softmax near the predicted position of the query, times a Gaussian around it (Luong et al. 2015, section 3.2)."""
    weights = weights_of(operands, "distribution")
    hidden = torch.tanh(torch.einsum("bqhd,hde->bhqe", operands.query, weights["weight"]))
    fraction = torch.sigmoid(torch.einsum("bhqe,he->bhq", hidden, weights["vector"]))[..., None]
    place, real = places(operands)[1], operands.key_padding_mask
    if real is not None and operands.key_positions is None:
        place = torch.tensor([[sum(row[:key]) for key in range(len(row))] for row in real.tolist()], device=real.device)
    apart = place[:, None, None, :] - fraction * allowed.sum(-1, keepdim=True)
    deviation = given.radius / 2
    return softmax(energies, allowed & (apart.abs() <= given.radius)) * torch.exp(-(apart**2) / (2 * deviation**2))


def stick_breaking(energies: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
    """Stick-breaking attention: σ(e_j) times the product of 1 - σ(e_k) over every allowed key k after j.

    `positions` are those of the keys [batch or 1, key].
    """
    later = positions[:, None, None, None, :] > positions[:, None, None, :, None]
    left = torch.where(allowed, 1 - torch.sigmoid(energies), 1.0)
    return torch.where(later, left[..., None, :], 1.0).prod(-1) * torch.sigmoid(energies) * allowed


def softmax(energies: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; zeros if there is none."""
    some = allowed.any(-1, keepdim=True)
    return torch.softmax(energies.masked_fill(~allowed & some, -math.inf), -1) * some


def sparsemax(energies: Tensor, allowed: Tensor) -> Tensor:
    """The projection of the scores onto the simplex, by bisection of the threshold (Martins and Astudillo 2016)."""
    some = allowed.any(-1, keepdim=True)
    lowest = max(-1e6, torch.finfo(energies.dtype).min / 2)  # float16 ends at 65504
    energies = energies.masked_fill(~allowed & some, lowest)
    high = energies.detach().amax(-1, keepdim=True)
    low = high - 1
    for _ in range(60):
        middle = (low + high) / 2
        more = (energies.detach() - middle).clamp(min=0).sum(-1, keepdim=True) > 1
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    support = energies.detach() > high
    # Given its support, the threshold is a sum, which has the correct gradient.
    threshold = (torch.where(support, energies, 0.0).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    return (energies - threshold).clamp(min=0) * some
