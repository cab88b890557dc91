"""Mamba-2: state space duality, one decay a head and token."""

from __future__ import annotations

from attn_core import Mechanism, hookimpl

from attn_mamba2.mechanism import Mamba2


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """What this plugin offers."""
    return [Mamba2()]
