"""Sparse attention that selects its keys by content: DeepSeek's, mixture of block and native sparse attention.

Also families of checkpoints with windows and sinks. The hook imports its adapters only when called, because this
module is loaded whenever `attn` starts.
"""

from __future__ import annotations

from typing import Any

from attn_core import hookimpl


@hookimpl
def attn_adapters() -> list[Any]:
    """The adapters of the families."""
    from attn_sparse.flint import FlintAdapter
    from attn_sparse.granite_swa import GraniteSwaAdapter

    return [FlintAdapter(), GraniteSwaAdapter()]
