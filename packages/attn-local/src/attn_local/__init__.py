"""Models run in the process that asks: what `attn_client.Client` answers, without a server."""

from __future__ import annotations

from attn_local.client import LocalClient

__all__ = ["LocalClient"]
