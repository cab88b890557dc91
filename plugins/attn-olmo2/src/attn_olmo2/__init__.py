"""OLMo 2 (OLMo Team 2025, arXiv 2501.00656) for attn: reads its Hugging Face checkpoints and GGUF files.

The hooks import what they return only when called, because this module is loaded whenever `attn` starts.
"""

from __future__ import annotations

from typing import Any

from attn_core import hookimpl


@hookimpl
def attn_adapters() -> list[Any]:
    """The adapter for checkpoints with `model_type` olmo2."""
    from attn_olmo2.olmo2 import Olmo2Adapter

    return [Olmo2Adapter()]


@hookimpl
def attn_gguf_architectures() -> list[Any]:
    """The GGUF architecture olmo2, with tensor names from the gguf library: OLMo 2 and, with windows, OLMo 3."""
    from attn_models.weights.gguf_families import WINDOW, GgufFamily

    from attn_olmo2.olmo2 import olmo3_keys

    read = WINDOW | {"attention.sliding_window_pattern", "rope.freq_base_swa"}
    return [GgufFamily("olmo2", "olmo2", olmo3_keys, read=read, relatives=("olmo3",)).architecture()]
