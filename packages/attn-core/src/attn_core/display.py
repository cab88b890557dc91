"""How masks and mechanisms show themselves in notebooks: as HTML, with pictures in SVG and LaTeX between `$$`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

TOKENS = 16
"""The number of queries and of keys in the picture of a mask."""

PIXELS = 10
"""The side of the square of one query-key pair in the picture, in pixels."""


def mask_grid(mask: Any, tokens: int = TOKENS) -> list[list[bool]]:
    """Whether query i may attend to key j, [query][key], over `tokens` tokens; of the first head if heads differ."""
    resolved = mask.over(tokens)
    resolved = resolved if resolved.heads is None else resolved.of_head(0)
    return [[bool(resolved.allows(query, key)) for key in range(tokens)] for query in range(tokens)]


def mask_text(mask: Any) -> str:
    """The mask in characters, one line per query, one column per key."""
    return "\n".join(" ".join("■" if allowed else "·" for allowed in row) for row in mask_grid(mask))


def mask_svg(mask: Any) -> str:
    """The mask as a picture: rows are queries, columns keys, filled where a query may attend to a key."""
    grid = mask_grid(mask)
    side = len(grid) * PIXELS
    squares = "".join(
        f'<rect x="{column * PIXELS}" y="{row * PIXELS}" width="{PIXELS - 1}" height="{PIXELS - 1}" fill="{fill}"/>'
        for row, entries in enumerate(grid)
        for column, fill in enumerate("#2a6fb0" if allowed else "#e6e6e6" for allowed in entries)
    )
    title = "<title>mask: rows are queries, columns are keys</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side}">{title}{squares}</svg>'


def mask_card(mask: Any) -> str:
    """The mask's expression above its picture."""
    axes = f"{TOKENS} queries down, {TOKENS} keys across" + (", of the first head" if mask.heads else "")
    return f"<div><p><code>{html.escape(repr(mask))}</code>, {axes}:</p>{mask_svg(mask)}</div>"


def mechanism_card(mechanism: Any, mask: Any, details: str) -> str:
    """The summary, details, equation and paper of a mechanism, and the picture of `mask` unless it is None."""
    paper, title = mechanism.paper, html.escape(mechanism.paper.title)
    if paper.url:
        title = f'<a href="{html.escape(paper.url)}">{title}</a>'
    parts = [
        f"<p><b>{html.escape(mechanism.name)}</b>: {html.escape(mechanism.summary)}</p>",
        f"<p><code>{html.escape(details)}</code></p>",
        f"<p>$${html.escape(mechanism.equation)}$$</p>",
        f"<p>{title}{', ' if title else ''}{html.escape(paper.cited)}</p>",
    ]
    return f"<div>{''.join(parts)}{'' if mask is None else mask_svg(mask)}</div>"


def sketch_card(mechanism: Any) -> str:
    """A mechanism with its capabilities, and the mask of a layer for a dozen tokens."""
    causal = "causal" in mechanism.capabilities and not mechanism.only_cross
    sizes = {"hidden_size": 64, "num_heads": 4, "causal": causal, "cross": mechanism.only_cross}
    spec = mechanism.spec(mechanism.Config(**sizes, **mechanism.sketch))
    mask = None if spec is None else spec.mask
    return mechanism_card(mechanism, mask, ", ".join(sorted(mechanism.capabilities)))


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as a table; the keys are its heads."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else ()))
    body = ("".join(f"<td>{html.escape(value)}</td>" for value in row.values()) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{cells}</tr>' for cells in body)}</table>"
