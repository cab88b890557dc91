"""What there is to see of a mechanism: its mask, or what a random layer does with a random sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_core import Capability, Mask, Mechanism, MechanismConfig

from attn_cli.sample import Grid, influence_grid, sample_grid, seen_grid


class View(NamedTuple):
    """A grid, and what it says in words."""

    caption: str
    grid: Grid


def view_of(
    mechanism: Mechanism, config: MechanismConfig, positions: int, options: Mapping[str, Any] | None = None
) -> View:
    """The mask where it alone says what is seen, else a sample; `options` are told in the caption."""
    told = ", ".join(f"{name}={value}" for name, value in (options or {}).items())
    words, grid = seen(mechanism, config, positions)
    return View(f"{words} ({told})" if told else words, grid)


def seen(mechanism: Mechanism, config: MechanismConfig, positions: int) -> View:
    """The view without options in its caption."""
    spec, chooses = mechanism.spec(config), mechanism.can(Capability.CHOOSES)
    if spec is not None and not chooses:
        return View("the mask: which keys (columns) each query (row) sees", mask_grid(spec.mask, positions))
    if mechanism.can(Capability.WEIGHTS, Capability.CHOOSES):
        words = "example: the keys (columns) that each query (row) sees in one head, random layer and input"
        return View(words, seen_grid(mechanism, config, positions))
    if mechanism.can(Capability.WEIGHTS):
        words = "example: mean weights of keys (columns) for each query (row), random layer and input"
        return View(words, sample_grid(mechanism, config, positions))
    words = "example: how much each output (row) depends on each input (column), one head, random layer and input"
    return View(words, influence_grid(mechanism, config, positions))


def mask_grid(mask: Mask, positions: int) -> Grid:
    """The mask over as many positions, 1 where a key is seen; of a mask that differs by head the mean of its heads."""
    bound, heads = mask.over(positions), mask.heads or 1
    masks = [bound.of_head(head) for head in range(heads)]
    places = range(positions)
    return [[sum(bool(one.allows(query, key)) for one in masks) / heads for key in places] for query in places]
