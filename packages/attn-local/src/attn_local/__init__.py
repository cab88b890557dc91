"""Runs models in the calling process, with the interface of `attn_client.Client` but without a server.

`LocalClient` is imported when it is first used: the plugin catalogue loads this package too, and must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_local.client import LocalClient

__all__ = ["LocalClient"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attn_local import client

    return getattr(client, name)
