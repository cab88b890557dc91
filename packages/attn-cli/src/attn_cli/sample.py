"""How a layer with random weights weighs a random sample: what a mechanism looks like that has no mask."""

from __future__ import annotations

from attn_core import Capability, Mechanism, MechanismConfig
from attn_core.errors import Incompatible, MissingPackage

Grid = list[list[float]]
"""A row per query, a column per key, each from 0 to 1."""


def sample_grid(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Grid:
    """The weights, averaged over heads, of a layer with random weights on a random sample; seeded.

    Raises `Incompatible` for a mechanism that has no attention weights, `MissingPackage` without torch.
    """
    if not mechanism.can(Capability.WEIGHTS):
        message = f"mechanism {mechanism.name!r} has no attention weights to draw"
        raise Incompatible(message, mechanism=mechanism.name)
    try:
        import torch
    except ImportError as error:
        raise MissingPackage.of("torch", "weighing a sample") from error
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        layer = mechanism.build(config).eval()
        rows = torch.randn(1, positions, config.width)
        source = (rows,) if mechanism.can(Capability.CROSS) else ()
        weights = layer.weights(rows, *source)[0].mean(0).double()
    grid: Grid = weights.tolist()
    return grid
