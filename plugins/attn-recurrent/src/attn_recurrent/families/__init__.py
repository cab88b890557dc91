"""Families of checkpoints whose layers are mechanisms of this package: they are read by attn-models' general decoder.

The hook imports what it returns only when called, because this module is loaded whenever `attn` starts.
"""

from __future__ import annotations

from typing import Any

from attn_core import hookimpl


@hookimpl
def attn_adapters() -> list[Any]:
    """The adapters of the families."""
    from attn_recurrent.families.kimi_linear import KimiLinearAdapter
    from attn_recurrent.families.lfm2 import Lfm2Adapter
    from attn_recurrent.families.qwen3_5 import Qwen35Adapter, Qwen35MoeAdapter, Qwen35VisionAdapter

    return [KimiLinearAdapter(), Lfm2Adapter(), Qwen35Adapter(), Qwen35MoeAdapter(), Qwen35VisionAdapter()]
