"""Adapters of random numbers, and models with these adapters merged into them."""

from __future__ import annotations

from pathlib import Path

import torch
from attn_models.loading import load_model, save_model
from attn_models.lora import AdapterConfig, LoraAdapter, merge_adapter, write_adapter
from attn_models.lora.files import weights_sha256


def make_adapter(base: Path, name: str, seed: int) -> None:
    """An adapter of a model in its home, and beside it the model with the adapter merged into it."""
    loaded = load_model(base)
    torch.manual_seed(seed)
    said = AdapterConfig(r=3, lora_alpha=6, base_model=base.name, base_sha256=weights_sha256(base))
    adapter = LoraAdapter.fresh(loaded.model, said, modules={})
    for layer in adapter:
        torch.nn.init.normal_(adapter.of(layer).b, std=0.5)
    write_adapter(base.parent / name, adapter.eval(), loaded.model, base)
    merge_adapter(loaded.model, adapter)
    save_model(base.parent / f"{name}-merged", loaded.model, loaded.tokenizer)
