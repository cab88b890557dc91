"""What a layer with random weights makes of a random sample: pictures of mechanisms that no mask describes.

All is seeded, and computed in float64, so that the same picture comes out anywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from attn_core import Capability, Mechanism, MechanismConfig
from attn_core.errors import Incompatible, MissingPackage

Grid = list[list[float]]
"""A row per query, a column per key, each from 0."""


def sample_grid(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Grid:
    """The sizes of the weights, averaged over heads; raises as `weights_of`."""
    grid: Grid = weights_of(mechanism, config, positions).abs().mean(0).tolist()
    return grid


def seen_grid(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Grid:
    """1 where the first head gives a key any weight; raises as `weights_of`."""
    grid: Grid = (weights_of(mechanism, config, positions)[0] > 0).double().tolist()
    return grid


def weights_of(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Any:
    """The weights [heads, query, key].

    Raises `Incompatible` for a mechanism that has no attention weights, `MissingPackage` without torch.
    """
    if not mechanism.can(Capability.WEIGHTS):
        message = f"mechanism {mechanism.name!r} has no attention weights to draw"
        raise Incompatible(message, mechanism=mechanism.name)
    torch = tensors()
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        layer, rows, source = drawn(torch, mechanism, config, positions)
        return layer.weights(rows, *source)[0]


def influence_grid(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Grid:
    """How much each output of a layer with one head depends on each input, as a share of the most in its row.

    That is the length of the derivative of a random projection of the output. Raises `MissingPackage` without torch.
    """
    torch = tensors()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        one = dataclasses.replace(config, heads=1, key_value_heads=None)
        layer, rows, source = drawn(torch, mechanism, one, positions)
        inputs = (source[0] if source else rows).requires_grad_()
        probed = layer(rows, *source)[0] @ torch.randn(config.width, dtype=torch.float64)
        slopes = [torch.autograd.grad(out, inputs, retain_graph=True)[0][0].norm(dim=-1) for out in probed]
    grid: Grid = [(slope / slope.max().clamp(min=1e-300)).tolist() for slope in slopes]
    return grid


def drawn(
    torch: Any, mechanism: Mechanism, config: MechanismConfig, positions: int
) -> tuple[Any, Any, tuple[Any, ...]]:
    """A layer, rows for it, and its source, if it attends to one, in a tuple."""
    torch.manual_seed(0)
    sized = config if config.context else dataclasses.replace(config, context=positions)
    layer = mechanism.build(sized).eval().double()
    rows = torch.randn(1, positions, config.width, dtype=torch.float64)
    return layer, rows, (rows.clone(),) if mechanism.can(Capability.CROSS) else ()


def tensors() -> Any:
    """Torch; raises `MissingPackage`."""
    try:
        import torch
    except ImportError as error:
        raise MissingPackage.of("torch", "drawing what a layer makes of a sample") from error
    return torch
