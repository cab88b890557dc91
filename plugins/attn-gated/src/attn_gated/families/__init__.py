"""Families of checkpoints whose layers are mechanisms of this package: they are read by attn-models' general decoder.

The hook imports what it returns only when called, because this module is loaded whenever `attn` starts.
"""

from __future__ import annotations

from typing import Any

from attn_core import hookimpl


@hookimpl
def attn_adapters() -> list[Any]:
    """The adapters of the families."""
    from attn_gated.families.afmoe import AfmoeAdapter
    from attn_gated.families.laguna import LagunaAdapter

    return [AfmoeAdapter(), LagunaAdapter()]
