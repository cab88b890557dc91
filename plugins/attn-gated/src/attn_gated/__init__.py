"""Softmax attention with gates: gated attention, forgetting attention, differential attention.

Also families of checkpoints whose layers are gated. The hook imports its adapters only when called, because this
module is loaded whenever `attn` starts.
"""

from __future__ import annotations

from typing import Any

from attn_core import hookimpl


@hookimpl
def attn_adapters() -> list[Any]:
    """The adapters of the families."""
    from attn_gated.afmoe import AfmoeAdapter
    from attn_gated.diffllama import DiffLlamaAdapter
    from attn_gated.laguna import LagunaAdapter

    return [AfmoeAdapter(), DiffLlamaAdapter(), LagunaAdapter()]


@hookimpl
def attn_gguf_architectures() -> list[Any]:
    """The GGUF architectures of the families."""
    from attn_gated.gguf import GGUF_FAMILIES

    return [family.architecture() for family in GGUF_FAMILIES]
