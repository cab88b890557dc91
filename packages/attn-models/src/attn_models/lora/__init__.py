"""LoRA adapters: trained on a frozen base model, read and written in PEFT's format; several can share one model.

These names are loaded on first use: a server recognises adapters without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.lazy import lazy_names

if TYPE_CHECKING:
    from attn_models.lora.adapter import LoraAdapter, merge_adapter, merged_adapter
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
    "merged_adapter",
    "read_adapter",
    "write_adapter",
]

lazy_names(
    __name__,
    {
        "peft_config": ("ADAPTER_CONFIG_NAME", "AdapterConfig"),
        "attached": ("AdaptedModel",),
        "adapter": ("LoraAdapter", "merge_adapter", "merged_adapter"),
        "sites": ("lora_sites",),
        "files": ("read_adapter", "write_adapter"),
    },
)
