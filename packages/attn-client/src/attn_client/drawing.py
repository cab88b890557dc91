"""Pictures of attention weights."""

from __future__ import annotations

import math
from pathlib import Path

from attn_core.errors import InvalidValue, MissingPackage
from attn_schema import AttentionMap

MAX_LABELLED = 64
"""Tokens up to which each is written on the axes; more would overlap."""


def draw(drawn: AttentionMap, title: str, path: Path) -> None:
    """Write a grid of heads as an image: queries down, keys across, dark is much; the format follows the name.

    Raises `MissingPackage` without matplotlib and `InvalidValue` for a path that cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage.of("attn-client[draw]", "drawing") from error
    columns = math.ceil(math.sqrt(len(drawn.heads)))
    rows = math.ceil(len(drawn.heads) / columns)
    side = min(6.0, max(2.4, 0.16 * len(drawn.key_tokens) + 1.2))
    figure = Figure(figsize=(side * columns, side * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(drawn.heads) :]:
        axes.set_axis_off()
    for head, weights, axes in zip(drawn.heads, drawn.attention_weights.view().tolist(), grid.flat, strict=False):
        axes.imshow(weights, cmap="Blues", vmin=0.0, aspect="auto", interpolation="nearest")
        axes.set_title(f"head {head}", fontsize=8)
        _label(axes.set_xticks, drawn.key_tokens, rotation=90)
        _label(axes.set_yticks, drawn.query_tokens, rotation=0)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InvalidValue(f"--out: {path}: {error}", field="out", given=path) from error


def _label(set_ticks: object, tokens: tuple[str, ...], rotation: int) -> None:
    """Write the tokens on an axis; white space is made visible, and a dollar sign is no formula."""
    if len(tokens) > MAX_LABELLED:
        return
    shown = [token.replace(" ", "·").replace("\n", "⏎").replace("$", r"\$") for token in tokens]
    set_ticks(range(len(tokens)), labels=shown, fontsize=6, rotation=rotation)  # type: ignore[operator]
