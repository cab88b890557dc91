"""Sparse attention that selects its keys by content: DeepSeek's, mixture of block and native sparse attention.

Also families of checkpoints with windows and sinks. The hook imports its adapters only when called, because this
module is loaded whenever `attn` starts.
"""

from __future__ import annotations

from typing import Any

from attn_core import ModelFamily, hookimpl


@hookimpl
def attn_adapters() -> list[Any]:
    """The adapters of the families."""
    from attn_sparse.deepseek_v4.adapter import DeepseekV4Adapter
    from attn_sparse.deepseek_v32 import DeepseekV32Adapter, GlmMoeDsaAdapter
    from attn_sparse.flint import FlintAdapter
    from attn_sparse.gemma4.adapter import Gemma4Adapter, Gemma4VisionAdapter
    from attn_sparse.glm5_next.adapter import Glm5NextAdapter, Glm5NextVisionAdapter
    from attn_sparse.granite_swa import GraniteSwaAdapter
    from attn_sparse.minimax import MiniMaxM2Adapter, MiniMaxM3Adapter, MiniMaxM3VisionAdapter

    return [
        DeepseekV32Adapter(),
        DeepseekV4Adapter(),
        FlintAdapter(),
        Gemma4Adapter(),
        Gemma4VisionAdapter(),
        Glm5NextAdapter(),
        Glm5NextVisionAdapter(),
        GlmMoeDsaAdapter(),
        GraniteSwaAdapter(),
        MiniMaxM2Adapter(),
        MiniMaxM3Adapter(),
        MiniMaxM3VisionAdapter(),
    ]


@hookimpl
def attn_gguf_architectures() -> list[Any]:
    """The GGUF architectures of the families."""
    from attn_sparse.gguf import GGUF_FAMILIES

    return [family.architecture() for family in GGUF_FAMILIES]


@hookimpl
def attn_models() -> list[ModelFamily]:
    """The families that can be trained."""
    from attn_sparse.deepseek_v4 import DeepseekV4Family
    from attn_sparse.gemma4 import Gemma4Family
    from attn_sparse.glm5_next import Glm5NextFamily

    return [DeepseekV4Family(), Gemma4Family(), Glm5NextFamily()]
