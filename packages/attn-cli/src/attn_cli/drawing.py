"""Drawing of attention weights as images."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, MissingPackage
from attn_schema import AttentionMap

MAX_LABELLED = 64
"""The maximum number of tokens for which the axes are labelled; more labels would overlap."""


def draw(drawn: AttentionMap, model: str, path: Path) -> None:
    """Write an image with one heat map for each head: queries down, keys across, darker for larger weights.

    Cross-attention has the tokens that are generated down, and the source across. All heads share one colour scale with
    a colour bar; the image format follows the suffix of `path`. Raises `MissingPackage` without matplotlib and
    `InvalidValue` for a path that cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage.of("attn-cli[draw]", "drawing") from error
    columns = math.ceil(math.sqrt(len(drawn.heads)))
    rows = math.ceil(len(drawn.heads) / columns)
    side = min(6.0, max(2.4 if len(drawn.heads) > 1 else 6.0, 0.16 * len(drawn.key_tokens) + 1.2))
    figure = Figure(figsize=(side * columns, side * rows), layout="constrained")
    FigureCanvasAgg(figure)
    title = f"{model}, layer {drawn.layer}, {drawn.mechanism}"
    figure.suptitle("\n".join(textwrap.wrap(title, max(24, round(side * columns * 9)))), fontsize=10)
    grid = figure.subplots(rows, columns, squeeze=False)
    matrices: Any = drawn.attention_weights.view().tolist()
    most = max((abs(weight) for head in matrices for row in head for weight in row), default=1.0) or 1.0
    image = None
    for axes in grid.flat[len(drawn.heads) :]:
        axes.set_axis_off()
    for head, weights, axes in zip(drawn.heads, matrices, grid.flat, strict=False):
        image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=most, aspect="auto", interpolation="nearest")
        axes.set_title(f"head {head}", fontsize=8)
        _label(axes.set_xticks, drawn.key_tokens, rotation=90)
        _label(axes.set_yticks, drawn.query_tokens, rotation=0)
    figure.supxlabel("source token" if drawn.cross_attention else "key", fontsize=9)
    figure.supylabel("generated token" if drawn.cross_attention else "query", fontsize=9)
    if image is not None:
        bar = figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, aspect=30)
        bar.set_label("attention weight", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InvalidValue(f"picture {path}: {error}", field="out", given=path) from error


def _label(set_ticks: object, tokens: tuple[str, ...], rotation: int) -> None:
    """Label an axis with the tokens; white space is made visible, and dollar signs are escaped from math mode."""
    if len(tokens) > MAX_LABELLED:
        return
    shown = [token.replace(" ", "·").replace("\n", "⏎").replace("$", r"\$") for token in tokens]
    set_ticks(range(len(tokens)), labels=shown, fontsize=6, rotation=rotation)  # type: ignore[operator]
