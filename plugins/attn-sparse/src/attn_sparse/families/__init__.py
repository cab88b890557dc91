"""Families of checkpoints with windows and sinks: they are read by attn-models' general decoder.

The hook imports what it returns only when called, because this module is loaded whenever `attn` starts.
"""

from __future__ import annotations

from typing import Any

from attn_core import hookimpl


@hookimpl
def attn_adapters() -> list[Any]:
    """The adapters of the families."""
    from attn_sparse.families.flint import FlintAdapter
    from attn_sparse.families.granite_swa import GraniteSwaAdapter

    return [FlintAdapter(), GraniteSwaAdapter()]
