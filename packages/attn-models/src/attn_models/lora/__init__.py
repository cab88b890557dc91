"""LoRA adapters: trained on a frozen base model, read and written in PEFT's format; several can share one model."""

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
