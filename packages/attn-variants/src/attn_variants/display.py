"""What a layer shows of itself: in `repr`, and in notebooks."""

from __future__ import annotations

import dataclasses
import html
from functools import partial
from typing import TYPE_CHECKING, Any

from attn_core import AttentionSpec, Capability, Mask, Mechanism, MechanismConfig

if TYPE_CHECKING:
    from torch import nn

TOKENS = 16
"""Queries and keys of the picture of a mask."""

PIXELS = 10
"""Side of one pair in the picture."""


def describe(module: nn.Module, mechanism: Mechanism, config: MechanismConfig) -> None:
    """Let a layer show its mechanism: by `repr`, by `print` of a model that contains it, and in notebooks.

    Works for layers of any package, whose classes know nothing of it.
    """
    shown: Any = module
    shown.extra_repr = partial(summary, mechanism, config)
    shown._repr_markdown_ = partial(markdown, mechanism, config)
    shown._repr_html_ = partial(page, mechanism, config)


def summary(mechanism: Mechanism, config: MechanismConfig) -> str:
    """Mechanism, heads and causality in one line, then the options that differ from their defaults."""
    spec = mechanism.spec(config)
    shown = [
        f"mechanism={mechanism.name!r}",
        *sizes(config, spec),
        f"causal={config.causal and not config.cross and mechanism.can(Capability.CAUSAL)}",
    ]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in SHOWN and value != field.default:
            shown.append(f"{field.name}={value!r}")
    return ", ".join(shown)


SHOWN = frozenset({"hidden_size", "num_heads", "num_kv_heads", "head_dim", "causal"})
"""Fields of every config that `sizes` and `summary` show by themselves."""


def sizes(config: MechanismConfig, spec: AttentionSpec | None) -> list[str]:
    """Width, numbers of heads and their size."""
    if spec is None:
        return [f"hidden_size={config.hidden_size}", f"num_heads={config.num_heads}"]
    heads = spec.heads
    return [
        f"hidden_size={config.hidden_size}",
        f"num_heads={heads.query}",
        f"num_kv_heads={heads.key_value}",
        f"head_dim={heads.key_size}",
    ]


def markdown(mechanism: Mechanism, config: MechanismConfig) -> str:
    """Summary, equation, paper and the picture of the mask, in Markdown."""
    paper, spec = mechanism.paper, mechanism.spec(config)
    title = f"[{paper.title}]({paper.url})" if paper.url else paper.title
    parts = [
        f"**{mechanism.name}**: {mechanism.summary}",
        f"`{summary(mechanism, config)}`",
        f"$$\n{mechanism.equation}\n$$",
        f"{title}, {paper.authors} {paper.year}",
    ]
    if spec is not None:
        parts.append(f"```text\n{mask_text(spec.mask)}\n```")
    return "\n\n".join(parts)


def page(mechanism: Mechanism, config: MechanismConfig) -> str:
    """The same in HTML; notebooks typeset the equation, and the mask is an SVG picture."""
    paper, spec = mechanism.paper, mechanism.spec(config)
    title = html.escape(paper.title)
    if paper.url:
        title = f'<a href="{html.escape(paper.url)}">{title}</a>'
    parts = [
        f"<p><b>{html.escape(mechanism.name)}</b>: {html.escape(mechanism.summary)}</p>",
        f"<p><code>{html.escape(summary(mechanism, config))}</code></p>",
        f"<p>$${html.escape(mechanism.equation)}$$</p>",
        f"<p>{title}, {html.escape(paper.authors)} {paper.year}</p>",
    ]
    if spec is not None:
        parts.append(mask_svg(spec.mask))
    return f"<div>{''.join(parts)}</div>"


def mask_grid(mask: Mask, tokens: int = TOKENS) -> list[list[bool]]:
    """Whether query i may attend to key j, of `tokens` tokens; of the first head where heads differ."""
    told = mask.over(tokens)
    told = told if told.heads is None else told.of_head(0)
    return [[bool(told.allows(query, key)) for key in range(tokens)] for query in range(tokens)]


def mask_text(mask: Mask) -> str:
    """The mask in characters, one line per query, one column per key."""
    return "\n".join(" ".join("■" if allowed else "·" for allowed in row) for row in mask_grid(mask))


def mask_svg(mask: Mask) -> str:
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
