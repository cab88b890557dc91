"""The representations of a layer: in `repr`, and in notebooks."""

from __future__ import annotations

import dataclasses
import html
from functools import partial
from typing import TYPE_CHECKING, Any

from attn_core import AttentionSpec, Capability, Mask, Mechanism, MechanismConfig

if TYPE_CHECKING:
    from torch import nn

TOKENS = 16
"""The number of queries and of keys in the picture of a mask."""

PIXELS = 10
"""The side of the square of one query-key pair in the picture, in pixels."""


def describe(module: nn.Module, mechanism: Mechanism, config: MechanismConfig) -> None:
    """Make a layer show its mechanism in `repr`, in `print` of a model that contains it, and in notebooks.

    Sets attributes of the instance, so that it works for the layer classes of any package.
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
"""Config fields that `summary` does not list among the options, as it shows them in a form of its own."""


def sizes(config: MechanismConfig, spec: AttentionSpec | None) -> list[str]:
    """The hidden size, numbers of heads and head size."""
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
    """The summary, equation, paper and mask of a layer, in Markdown."""
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
    """The summary, equation, paper and mask of a layer, in HTML: LaTeX between $$ and an SVG picture."""
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
    """Whether query i may attend to key j, [query][key], over `tokens` tokens; of the first head if heads differ."""
    resolved = mask.over(tokens)
    resolved = resolved if resolved.heads is None else resolved.of_head(0)
    return [[bool(resolved.allows(query, key)) for key in range(tokens)] for query in range(tokens)]


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
