"""Hosts a loaded model with its engine or encoder in process, with an API in the types of attn-schema; no network.

These names are loaded on first use: a gateway names tasks without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.lazy import lazy_names

if TYPE_CHECKING:
    from attn_engine.host.host import Deliver, EmbedTask, ModelHost, TextTask
    from attn_engine.host.opening import open_host
    from attn_engine.host.preparation import Preparation
    from attn_engine.host.tokenization import PromptTokenizer

__all__ = [
    "Deliver",
    "EmbedTask",
    "ModelHost",
    "Preparation",
    "PromptTokenizer",
    "TextTask",
    "open_host",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "host": ("Deliver", "EmbedTask", "ModelHost", "TextTask"),
        "preparation": ("Preparation",),
        "tokenization": ("PromptTokenizer",),
        "opening": ("open_host",),
    },
)
