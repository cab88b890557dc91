"""How a law says that it is broken."""

from __future__ import annotations

import torch
from torch import Tensor


class LawBroken(AssertionError):
    """What was checked does not keep the law; the message says where and by how much."""


def require(holds: object, message: str) -> None:
    """Raise `LawBroken` with `message` unless `holds`."""
    if not holds:
        raise LawBroken(message)


def require_same(actual: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    """Raise `LawBroken` unless both have one shape and no element differs by more than `tolerance` (1 + |expected|).

    `what` names the comparison, such as "decoded row 3 and row 3 of the full forward". Not-a-number is never the same.
    """
    require(actual.shape == expected.shape, f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)} differ")
    if not actual.numel():
        return
    wide = torch.float64 if not expected.is_complex() else torch.complex128
    error = (actual.detach().to(wide) - expected.detach().to(wide)).abs()
    allowed = tolerance * (1 + expected.detach().to(wide).abs())
    if bool((error <= allowed).all()):
        return
    worst = int(torch.where(error <= allowed, 0, error.nan_to_num(float("inf"))).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    raise LawBroken(
        f"{what} differ at {index}: {actual.flatten()[worst].item()!r} and {expected.flatten()[worst].item()!r}"
        f" (allowed {tolerance:g})"
    )


def require_within(actual: Tensor, expected: Tensor, what: str, error: float) -> None:
    """Raise `LawBroken` unless both have one shape and no element differs by more than `error`, as a number."""
    require(actual.shape == expected.shape, f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)} differ")
    off = (actual.detach().double() - expected.detach().double()).abs()
    require(bool((off <= error).all()), f"{what} differ by up to {off.max().item():g} (allowed {error:g})")
