"""The representations of a layer: in `repr`, and in notebooks."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from attn_core import AttentionSpec, Capability, Mechanism, MechanismConfig
from attn_core.display import mask_text, mechanism_card

if TYPE_CHECKING:
    from torch import nn


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
        f"{title}{', ' if title else ''}{paper.cited}",
    ]
    if spec is not None:
        parts.append(f"```text\n{mask_text(spec.mask)}\n```")
    return "\n\n".join(parts)


def page(mechanism: Mechanism, config: MechanismConfig) -> str:
    """The summary, equation, paper and mask of a layer, in HTML: LaTeX between $$ and an SVG picture."""
    spec = mechanism.spec(config)
    return mechanism_card(mechanism, None if spec is None else spec.mask, summary(mechanism, config))
