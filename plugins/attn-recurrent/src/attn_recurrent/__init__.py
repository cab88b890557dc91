"""Mixers whose state has a fixed size: Gated DeltaNet, Mamba-2, RWKV-7 and short convolutions.

Also families of checkpoints that have these layers. The hook imports its adapters only when called, because this
module is loaded whenever `attn` starts.
"""

from __future__ import annotations

from typing import Any

from attn_core import ModelFamily, hookimpl


@hookimpl
def attn_adapters() -> list[Any]:
    """The adapters of the families."""
    from attn_recurrent.kimi_linear import KimiLinearAdapter
    from attn_recurrent.lfm2 import Lfm2Adapter
    from attn_recurrent.minimax.adapter import MiniMaxAdapter
    from attn_recurrent.qwen3_5 import Qwen35Adapter, Qwen35MoeAdapter, Qwen35VisionAdapter
    from attn_recurrent.rwkv7.adapter import Rwkv7Adapter

    return [
        KimiLinearAdapter(),
        Lfm2Adapter(),
        Qwen35Adapter(),
        Qwen35MoeAdapter(),
        Qwen35VisionAdapter(),
        MiniMaxAdapter(),
        Rwkv7Adapter(),
    ]


@hookimpl
def attn_gguf_architectures() -> list[Any]:
    """The GGUF architectures of LFM2 and Qwen3.5."""
    from attn_recurrent.gguf import GGUF_FAMILIES

    return [family.architecture() for family in GGUF_FAMILIES]


@hookimpl
def attn_models() -> list[ModelFamily]:
    """The families that can be trained."""
    from attn_recurrent.minimax import MiniMaxFamily
    from attn_recurrent.rwkv7 import Rwkv7Family

    return [MiniMaxFamily(), Rwkv7Family()]
