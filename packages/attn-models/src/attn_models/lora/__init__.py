"""LoRA adapters: trained on a frozen base model, read and written in PEFT's format; several can share one model.

These names are loaded on first use: a server recognises adapters without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_models.lora.adapter import LoraAdapter, merge_adapter
    from attn_models.lora.attached import AdaptedModel
    from attn_models.lora.files import read_adapter, write_adapter
    from attn_models.lora.peft_config import ADAPTER_CONFIG_NAME, AdapterConfig
    from attn_models.lora.sites import lora_sites

__all__ = [
    "ADAPTER_CONFIG_NAME",
    "AdaptedModel",
    "AdapterConfig",
    "LoraAdapter",
    "lora_sites",
    "merge_adapter",
    "read_adapter",
    "write_adapter",
]

_HOMES = {
    "ADAPTER_CONFIG_NAME": "peft_config",
    "AdaptedModel": "attached",
    "AdapterConfig": "peft_config",
    "LoraAdapter": "adapter",
    "lora_sites": "sites",
    "merge_adapter": "adapter",
    "read_adapter": "files",
    "write_adapter": "files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"attn_models.lora.{_HOMES[name]}"), name)
