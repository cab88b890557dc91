"""Gated DeltaNet: a memory that fades and that keys overwrite."""

from __future__ import annotations

from attn_core import Mechanism, hookimpl

from attn_gated_deltanet.mechanism import GatedDeltaNet


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """What this plugin offers."""
    return [GatedDeltaNet()]
