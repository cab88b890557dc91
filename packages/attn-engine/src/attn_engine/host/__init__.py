"""Hosts a loaded model with its engine or encoder in process, with an API in the types of attn-schema; no network.

These names are loaded on first use: a gateway names tasks without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "Deliver": "host",
    "EmbedTask": "host",
    "ModelHost": "host",
    "Preparation": "preparation",
    "PromptTokenizer": "tokenization",
    "TextTask": "host",
    "open_host": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"attn_engine.host.{_HOMES[name]}"), name)
