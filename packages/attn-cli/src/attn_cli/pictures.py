"""Grids and curves, in characters and in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, MissingPackage

from attn_cli.sample import Grid

SHADES = " ░▒▓█"
LEAST = 1e-12
"""What is less is rounding, and nothing."""


def as_text(grid: Grid) -> str:
    """The grid in characters, a line per query; darker is more, and only what is nothing stays blank."""
    values = [value for row in grid for value in row]
    if set(values) <= {0.0, 1.0}:
        return "\n".join(" ".join("■" if value else "·" for value in row) for row in grid)
    most = max(*values, LEAST)
    return "\n".join("".join(shade(max(value, 0.0) / most) * 2 for value in row) for row in grid)


def shade(share: float) -> str:
    """The character for a share from 0 to 1."""
    steps = len(SHADES) - 1
    return SHADES[max(round(share * steps), share > LEAST)]


def draw_grid(grid: Grid, title: str, path: Path) -> None:
    """Write the grid as a picture; raises as `save` does."""
    figure = new_figure((5.5, 5.2))
    axes = figure.add_subplot()
    image = axes.imshow(grid, cmap="Blues", vmin=0.0, interpolation="nearest")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(title, fontsize="small", wrap=True)
    figure.colorbar(image, ax=axes, shrink=0.8)
    save(figure, path)


def draw_curves(curves: Mapping[str, Mapping[str, Sequence[float]]], lengths: Sequence[int], path: Path) -> None:
    """Write one panel a quantity, one line a mechanism, over sequence lengths, both axes logarithmic."""
    figure = new_figure((5.0 * len(curves), 4.2))
    for place, (quantity, lines) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(1, len(curves), place)
        for number, (name, values) in enumerate(lines.items()):
            # Mechanisms often cost the same; dashes of different lengths keep both lines visible.
            axes.plot(lengths, values, marker="o", markersize=3, dashes=(4 + 2 * number, number), label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_title(quantity)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    save(figure, path)


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure of `size` inches; raises `MissingPackage` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage.of("attn-cli[draw]", "drawing") from error
    return Figure(figsize=size, layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write the figure; raises `InvalidValue` for a path that cannot be written or an unknown format."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidValue.of("--draw", str(path), f"a file that can be written ({error})") from error
