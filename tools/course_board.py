"""The board on which figures of the course are drawn, in the colours of a light and of a dark page."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

THEMES = {"light": ("#1f2328", "#d0d7de", "#f6f8fa", "#0969da"), "dark": ("#e6edf3", "#484f58", "#161b22", "#58a6ff")}
"""Ink, lines, fill and accent of each theme; pages are seen through the background."""
WARM = "#d4791f"


class Board:
    """Axes without frame in units of text, for boxes and arrows, or for curves."""

    def __init__(self, theme: str, width: float, height: float) -> None:
        self.ink, self.line, self.fill, self.accent = THEMES[theme]
        self.figure = Figure(figsize=(width, height), layout="constrained")
        self.figure.patch.set_alpha(0.0)
        self.axes: Any = self.figure.add_subplot()
        self.axes.patch.set_alpha(0.0)

    def plain(self, right: float, top: float) -> None:
        """No axes; x from 0 to `right` and y from 0 to `top`."""
        self.axes.set(xlim=(0, right), ylim=(0, top))
        self.axes.axis("off")

    def box(
        self, x: float, y: float, text: str, *, width: float = 1.6, color: str | None = None
    ) -> tuple[float, float]:
        """A box around (x, y) with a text."""
        edge = color or self.line
        shape = FancyBboxPatch(
            (x - width / 2, y - 0.28), width, 0.56, boxstyle="round,pad=0.02,rounding_size=0.1", fc=self.fill, ec=edge
        )
        self.axes.add_patch(shape)
        self.text(x, y, text)
        return x, y

    def text(self, x: float, y: float, text: str, **kwargs: Any) -> None:
        """Text around (x, y)."""
        self.axes.text(x, y, text, **{"ha": "center", "va": "center", "color": self.ink, "fontsize": 9} | kwargs)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, color: str | None = None, bend: float = 0.0
    ) -> None:
        """An arrow between two points."""
        style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "color": color or self.ink, "lw": 1.0}
        self.axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))

    def labelled(self, x: str, y: str) -> None:
        """Axes with these labels, in ink."""
        self.axes.set(xlabel=x, ylabel=y)
        self.axes.tick_params(colors=self.ink)
        for part in (self.axes.xaxis.label, self.axes.yaxis.label, self.axes.title):
            part.set_color(self.ink)
        for spine in self.axes.spines.values():
            spine.set_color(self.line)
        if self.axes.get_legend_handles_labels()[0]:
            legend = self.axes.legend(frameon=False, fontsize="small")
            for text in legend.get_texts():
                text.set_color(self.ink)

    def map(self, values: torch.Tensor, x: str, y: str) -> None:
        """A heat map, from the page's background to the accent."""
        colors = LinearSegmentedColormap.from_list("page", [self.fill, self.accent])
        self.axes.imshow(values.numpy(), cmap=colors, aspect="auto", interpolation="nearest")
        self.labelled(x, y)
