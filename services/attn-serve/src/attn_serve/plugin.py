"""The plugin of attn-serve, which provides the inference and model services."""

from __future__ import annotations

from typing import Any

from attn_core.plugins.hooks import hookimpl


@hookimpl
def attn_services(cluster: Any) -> list[Any]:
    """The gRPC services for inference and for managing the served models."""
    from attn_serve.service import InferenceGrpc

    return [InferenceGrpc(cluster)]
