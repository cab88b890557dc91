"""Pictures of attention weights and of completions: figures of matplotlib, and HTML for notebooks, which needs none."""

from __future__ import annotations

import base64
import html
import io
import math
import struct
import textwrap
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, MissingPackage

MAX_LABELLED = 64
"""The maximum number of tokens for which the axes are labelled; more labels would overlap."""


def draw(drawn: Any, model: str, path: Path) -> None:
    """Write the figure of an `AttentionMap` to a file, whose suffix says its format.

    Raises `InvalidValue` for a path that cannot be written, and as `figure`.
    """
    picture = figure(drawn, f"{model}, layer {drawn.layer}, {drawn.mechanism}")
    try:
        picture.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InvalidValue(f"picture {path}: {error}", field="out", given=path) from error


def figure(drawn: Any, title: str) -> Any:
    """A matplotlib figure of an `AttentionMap`, a heat map for each head: queries down, keys across.

    Cross-attention has the tokens that are generated down, and the source across. Larger weights are darker; all heads
    share one colour scale with a colour bar. Raises `MissingPackage` without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage.of("attn-schema[draw]", "drawing") from error
    columns = math.ceil(math.sqrt(len(drawn.heads)))
    rows = math.ceil(len(drawn.heads) / columns)
    side = min(6.0, max(2.4 if len(drawn.heads) > 1 else 6.0, 0.16 * len(drawn.key_tokens) + 1.2))

    class Shown(Figure):
        """A figure that a notebook shows whether or not pyplot, which registers those that it makes, is imported."""

        def _repr_png_(self) -> bytes:
            held = io.BytesIO()
            self.savefig(held, dpi=100)
            return held.getvalue()

    picture = Shown(figsize=(side * columns, side * rows), layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle("\n".join(textwrap.wrap(title, max(24, round(side * columns * 9)))), fontsize=10)
    grid = picture.subplots(rows, columns, squeeze=False)
    matrices = drawn.attention_weights.view().tolist()
    most = max((abs(weight) for head in matrices for row in head for weight in row), default=1.0) or 1.0
    image = None
    for axes in grid.flat[len(drawn.heads) :]:
        axes.set_axis_off()
    for head, weights, axes in zip(drawn.heads, matrices, grid.flat, strict=False):
        image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=most, aspect="auto", interpolation="nearest")
        axes.set_title(f"head {head}", fontsize=8)
        _label(axes.set_xticks, drawn.key_tokens, rotation=90)
        _label(axes.set_yticks, drawn.query_tokens, rotation=0)
    picture.supxlabel("source token" if drawn.cross_attention else "key", fontsize=9)
    picture.supylabel("generated token" if drawn.cross_attention else "query", fontsize=9)
    if image is not None:
        bar = picture.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, aspect=30)
        bar.set_label("attention weight", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return picture


def _label(set_ticks: object, tokens: tuple[str, ...], rotation: int) -> None:
    """Label an axis with the tokens; white space is made visible, and dollar signs are escaped from math mode."""
    if len(tokens) > MAX_LABELLED:
        return
    shown = [visible(token).replace("$", r"\$") for token in tokens]
    set_ticks(range(len(tokens)), labels=shown, fontsize=6, rotation=rotation)  # type: ignore[operator]


CELL = 16
"""The side of a cell of a labelled picture in a notebook, in pixels."""
THUMBNAIL = 96
"""The width of the picture of one head in a notebook, in pixels."""
MAX_SHOWN = 2**21
"""The most weights of a map that a notebook shows by itself."""
FIRST, LAST = (255, 255, 255), (6, 42, 92)
"""The colours, red, green and blue, of no weight and of the largest."""


def png(matrix: Sequence[Sequence[float]], most: float) -> bytes:
    """An image with a pixel for each value, the darker the larger its absolute value, up to `most`."""
    palette = bytes(round(a + (b - a) * step / 255) for step in range(256) for a, b in zip(FIRST, LAST, strict=True))
    lines = b"".join(b"\0" + bytes(min(255, round(255 * abs(value) / most)) for value in row) for row in matrix)
    header = struct.pack(">IIBBBBB", len(matrix[0]), len(matrix), 8, 3, 0, 0, 0)  # 8 bits a pixel, of a palette
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def map_html(drawn: Any) -> str:
    """An `AttentionMap` for a notebook: the mean over heads with its tokens, and each head, up to `typical`."""
    down, across = ("generated", "source") if drawn.cross_attention else ("query", "key")
    what = f"{len(drawn.query_tokens)} {down} tokens down, {len(drawn.key_tokens)} {across} tokens across"
    head = f"<p><b>layer {drawn.layer}</b>, {html.escape(drawn.mechanism)}, {len(drawn.heads)} heads: {what}</p>"
    if not 0 < math.prod(drawn.attention_weights.shape) <= MAX_SHOWN:
        return f"{head}<p>attn_cli.pages.explore shows a map of this size.</p>"
    matrices = drawn.attention_weights.view().tolist()
    mean = [[math.fsum(cell) / len(cell) for cell in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
    figures = [
        f'<figure style="margin:0">{_image(weights, THUMBNAIL)}<figcaption>head {number}</figcaption></figure>'
        for number, weights in zip(drawn.heads, matrices, strict=True)
    ]
    row = "display:flex;flex-wrap:wrap;gap:8px"
    return f'{head}{_labelled(mean, drawn.query_tokens, drawn.key_tokens)}<div style="{row}">{"".join(figures)}</div>'


def typical(matrix: Sequence[Sequence[float]]) -> float:
    """The median over rows of the largest weight on another key than the first: the end of the scale of colours.

    The first rows of causal attention have few keys, and many heads leave the first key what they have no use for.
    """
    largest = sorted(max(map(abs, row[1:] or row)) for row in matrix)
    return largest[len(largest) // 2] or 1.0


def _image(matrix: Sequence[Sequence[float]], width: int, place: str = "") -> str:
    """The image of a matrix in HTML, or with a `place` in an SVG."""
    height = max(1, round(width * len(matrix) / len(matrix[0])))
    data = f"data:image/png;base64,{base64.b64encode(png(matrix, typical(matrix))).decode()}"
    style = f'style="image-rendering:pixelated;border:1px solid #888" width="{width}" height="{height}"'
    return f'<image {place} {style} href="{data}"/>' if place else f'<img alt="" {style} src="{data}"/>'


def _labelled(matrix: Sequence[Sequence[float]], down: Sequence[str], across: Sequence[str]) -> str:
    """The mean over heads with the tokens at its sides, or without them if they are too many."""
    if max(len(down), len(across)) > MAX_LABELLED:
        return f"<p>mean of the heads</p>{_image(matrix, 5 * THUMBNAIL)}"
    left, top = (8 * min(16, max(len(token) for token in side)) + 8 for side in (down, across))
    rows, columns = ([html.escape(visible(token)[:16]) for token in side] for side in (down, across))
    texts = [
        f'<text x="{left - 4}" y="{top + CELL * place + 12}" text-anchor="end">{text}</text>'
        for place, text in enumerate(rows)
    ]
    texts += [
        f'<text transform="translate({left + CELL * place + 12},{top - 4}) rotate(-90)">{text}</text>'
        for place, text in enumerate(columns)
    ]
    picture = _image(matrix, CELL * len(across), f'x="{left}" y="{top}" preserveAspectRatio="none"')
    size = f'width="{left + CELL * len(across) + 4}" height="{top + CELL * len(down) + 4}"'
    style = 'font-family="monospace" font-size="12" fill="currentColor"'
    inner = picture + "".join(texts)
    return f'<p>mean of the heads</p><svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{inner}</svg>'


def visible(token: str) -> str:
    """A token with its white space visible."""
    return token.replace(" ", "·").replace("\n", "⏎")


def completion_html(text: str, facts: str) -> str:
    """A completion's text for a notebook, with `facts` below it."""
    return f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre><p><small>{html.escape(facts)}</small></p>'
